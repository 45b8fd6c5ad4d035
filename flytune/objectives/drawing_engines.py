"""Engines that draw the answers of a step for a trainer: the trained model itself, or a server of vLLM.

All processes of a run call an engine together. With vLLM the first process of each node writes the weights
before a drawing, and the node's servers, one on each GPU that draws, load them; the processes then ask for
their own answers, divided among these servers, and the trained model scores them. vLLM rounds otherwise than
the trainer, so that its log-probabilities are near to the trainer's, not equal; answers whose
log-probabilities are further away are of other weights, and are not used.
"""

import itertools
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flytune import json_core
from flytune.errors import EngineError, ServingError, TrainingError
from flytune.export import write
from flytune.models import loading, rope, tokenizers
from flytune.models.scoring import padded
from flytune.recipe import Grpo, Recipe, VllmEngine
from flytune.rollouts import Completion, Drawing, VllmProcess, VllmServer, WantedAnswer, draw, numbers_of
from flytune.sentences import counted
from flytune.servers import Client

BOUND = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Largest mean distance, in nats a token, between the log-probabilities of both engines, by model.dtype: the
gate's bounds of a loss (flytune/export/gate.py)."""
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 1.1
"""Free bytes of /dev/shm that weights need, as a multiple of their size."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's --max-lora-rank (0.32.0, vllm/config/lora.py: MaxLoRARanks)."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_Result = TypeVar("_Result")


class DrawingEngine:
    """Engine that draws the answers of a step, on each process of a run."""

    def draw(
        self, trainer: Any, step: int, wanted: Sequence[WantedAnswer], drawing: Drawing, at_a_time: int
    ) -> list[Completion]:
        """Return an answer to each prompt, by the weights before `step`. All processes call it with equally
        many.

        Args:
            at_a_time: answers of one forward pass of the trained model.

        Raises:
            TrainingError: an engine beside the trainer draws by other weights, or does not draw.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what it has started."""


class TrainedModel(DrawingEngine):
    """The trained model itself, called by transformers."""

    def draw(
        self, trainer: Any, step: int, wanted: Sequence[WantedAnswer], drawing: Drawing, at_a_time: int
    ) -> list[Completion]:
        drawn = list[Completion]()
        for start in range(0, len(wanted), at_a_time):
            part = wanted[start : start + at_a_time]
            uniforms = [numbers_of(answer.key, answer.most) for answer in part]
            drawn += draw_evaluated(trainer, [answer.prompt for answer in part], uniforms, drawing)
        return drawn


class Server(NamedTuple):
    """A server that draws for the processes of a node."""

    number: int
    """Place among those of the node."""
    address: str
    key: str | None
    """Key of a server that the run has started; None: that of the environment."""
    run: str
    """Text that names this run's weights at the server."""
    base: str
    """Name of the model without an adapter."""


class Served(DrawingEngine):
    """Servers of vLLM, which get the weights of each step."""

    def __init__(self, recipe: Recipe, section: VllmEngine, temperature: float) -> None:
        self._recipe, self._section, self._temperature = recipe, section, temperature
        self._seconds = section.timeout_minutes * 60
        self._processes = dict[int, VllmProcess]()
        """Servers that this process has started, by their numbers."""
        self._servers = list[Server]()
        """Those that draw for the processes of this node."""
        self._apis = list[VllmServer]()
        self._folder: Path | None = None
        self._loaded, self._is_asleep = "", False

    def draw(
        self, trainer: Any, step: int, wanted: Sequence[WantedAnswer], drawing: Drawing, at_a_time: int
    ) -> list[Completion]:
        model = self._hand_over(trainer, step)
        drawn = self._agreed(trainer, lambda: self._drawn(trainer, model, wanted, drawing))
        if _shares_gpu(trainer, self._section):
            self._agreed(trainer, self._sleep)
        scored = _scored(trainer, wanted, drawn, drawing.pad, at_a_time)
        _check_near(trainer, scored, BOUND[self._recipe.model.dtype])
        return scored

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._servers, self._folder = {}, [], None

    def _drawn(
        self, trainer: Any, model: str, wanted: Sequence[WantedAnswer], drawing: Drawing
    ) -> list[Completion]:
        def drawn_by(api: VllmServer, part: slice) -> list[Completion]:
            answers = api.draw(model, wanted[part], drawing)
            # Of an adapter, each answer names it.
            if self._is_full and api.weights() != self._loaded:
                raise TrainingError(
                    f"{api.client.address}: its weights are not those of this step ({self._loaded}) any "
                    "more: another run uses the server, or it was started anew; give this run a server of "
                    "its own"
                )
            return answers

        place, count = trainer.args.local_process_index, trainer.run.plan.processes
        parts = parts_of(len(wanted), place, count, len(self._apis))
        asked = [number for number, part in enumerate(parts) if part.start < part.stop]
        drawn = _together(lambda number: drawn_by(self._apis[number], parts[number]), asked)
        return [answer for answers in drawn for answer in answers]

    def _sleep(self) -> None:
        """Give the GPU back to the trainer, on the process that has started the server."""
        for number in self._processes:
            self._apis[number].sleep()
            self._is_asleep = True

    @property
    def _is_full(self) -> bool:
        return self._recipe.method.name == "full"

    def _hand_over(self, trainer: Any, step: int) -> str:
        """Give the weights before `step` to the servers, which are started where they do not run; return the
        model's name there."""
        writes, kept = _is_writer(trainer, self._section), kept_servers(trainer, self._section)
        if kept and self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="flytune-weights-", dir=self._place(trainer)))
            if self._section.folder is not None:
                self._folder.chmod(0o755)  # a server elsewhere may be another user's process
        own_folder = (self._folder or Path(os.devnull)) / f"step-{step:08}"
        tokenizer = trainer.run.dataset / "tokenizer"
        write.write_weights(trainer, self._recipe, tokenizer, own_folder, writes=writes)
        if writes and self._is_full and trainer.args.device.type == "cpu":
            _untie(trainer.model, own_folder)
        folder = _nearest(trainer, own_folder if writes else None)
        if not self._servers:
            started = self._agreed(trainer, lambda: self._started(trainer, folder, kept))
            self._servers = _of_node(trainer, self._section, started)
            self._apis = [
                VllmServer(Client(server.address, server.key, self._seconds, VllmServer.largest))
                for server in self._servers
            ]
        first = self._servers[0]
        name = f"{first.run}-{step}"
        self._agreed(trainer, lambda: _together(lambda number: self._load(number, name, folder), kept))
        if writes:
            shutil.rmtree(folder)
        self._loaded, self._is_asleep = name, False
        return first.base if self._is_full else name

    def _started(self, trainer: Any, folder: Path, kept: Sequence[int]) -> list[Server]:
        """Return the servers that this process looks after: the recipe's, or those that it starts with the
        weights in `folder`."""
        section = self._section
        if section.address is None and kept:
            assert self._folder is not None
            model = folder if self._is_full else loading.local_folder(self._recipe.model)
            options = self._options(trainer, model)
            for number in kept:
                gpu = gpu_of(trainer, section, number)
                self._processes[number] = VllmProcess(section.python, options, self._folder, gpu)
        return [self._server(trainer, number) for number in kept]

    def _server(self, trainer: Any, number: int) -> Server:
        """Return a server that answers, and has the run's base model."""
        process, key = self._processes.get(number), None
        address = self._section.address or ""
        if process is not None:
            address, key = process.address, process.key
        api = VllmServer(Client(address, key, self._seconds))
        if process is not None:
            process.wait(api.is_ready, self._seconds)
        (base, longest), needed = api.base(), self._recipe.data.max_length
        if longest < needed:
            raise TrainingError(
                f"{address}: vLLM takes {counted(longest, 'token')}, and data.max_length is {needed:,}; "
                f"start it with --max-model-len {needed}"
            )
        for text in tokenizers.PROBES[:-1]:
            if api.tokens(text) != trainer.processing_class(text, add_special_tokens=False)["input_ids"]:
                raise TrainingError(
                    f"{address}: the server makes other tokens of {text!r:.60} than this run: it has another "
                    f"base than {self._recipe.model.name_or_path}; start it with that model"
                )
        return Server(number, address, key, f"flytune-{secrets.token_hex(4)}", base)

    def _options(self, trainer: Any, model: Path) -> list[str]:
        recipe = self._recipe
        # Those of a draw have the temperature, and none of the tokens that top_p and its kind leave out.
        mode = "processed" if self._temperature != 1 else "raw"
        options = {
            "--model": str(model),
            "--served-model-name": "base",
            "--dtype": recipe.model.dtype,
            "--max-model-len": str(recipe.data.max_length),
            "--logprobs-mode": f"{mode}_logprobs",
            "--generation-config": "vllm",
        }
        switches = []
        if not self._is_full:
            # The config.json beside all weights has it; that of a base says nothing of the recipe's scaling.
            scaling = rope.arguments(recipe.model)
            options |= {"--hf-overrides": json.dumps(scaling)} if scaling else {}
            rank = next(rank for rank in _RANKS if rank >= recipe.method.largest_rank)
            options |= {"--max-loras": "1", "--max-lora-rank": str(rank)}
            switches.append("--enable-lora")
        if _shares_gpu(trainer, self._section):
            switches.append("--enable-sleep-mode")
        if _shares_gpu(trainer, self._section) or self._section.gpus:
            options["--gpu-memory-utilization"] = str(self._section.memory_share)
        else:
            switches.append("--enforce-eager")  # compilation takes minutes on a CPU
        return [*(word for pair in options.items() for word in pair), *switches]

    def _load(self, number: int, name: str, folder: Path) -> None:
        api = self._apis[number]
        if self._is_asleep:
            api.wake()
        if not self._is_full:
            if self._loaded:
                api.unload_adapter(self._loaded)
            api.load_adapter(name, folder)
        else:
            if self._loaded or not self._processes:  # it was not started with them
                api.load_weights(folder)
            api.name_weights(name)

    def _place(self, trainer: Any) -> str | None:
        """Return where the weights are written; None for the temporary folder."""
        if self._section.folder is not None:
            return self._section.folder
        parameters = trainer.model.parameters()
        size = sum(write.elements(part) for part in parameters if self._is_full or part.requires_grad)
        needed = _ROOM * size * (_BYTES[self._recipe.model.dtype] if self._is_full else 4)
        has_room = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > needed
        return str(_SHARED_MEMORY) if has_room else None

    def _agreed(self, trainer: Any, function: Callable[[], _Result]) -> _Result:
        """Return a function's result on this process, when it has returned on all of them.

        Raises:
            TrainingError: it failed on any of them; the same on all.
        """
        result, error = None, None
        try:
            result = function()
        except (ServingError, TrainingError) as caught:
            error = self._with_end(caught)
        failed = [other for other in gathered(trainer, [error]) if other is not None]
        if failed:
            raise failed[0]
        return result  # type: ignore[return-value]  # of the function, where it has not failed

    def _with_end(self, error: Exception) -> TrainingError:
        """Return an error with the end of a server's log, where one has ended."""
        if isinstance(error, TrainingError):
            return error
        for process in self._processes.values():
            if process.has_ended(1.0):
                return EngineError(f"vLLM has ended: {process.last_lines()} ({error})")
        return EngineError(f"vLLM does not draw: {error}")


def engine_of(recipe: Recipe) -> DrawingEngine:
    """Return the engine that a recipe names."""
    assert isinstance(recipe.objective, Grpo)
    section = recipe.objective.engine
    if isinstance(section, VllmEngine):
        return Served(recipe, section, recipe.objective.temperature)
    return TrainedModel()


def _untie(model: Any, folder: Path) -> None:
    """Give tied weights in a written model a tensor each.

    On a CPU vLLM (0.32.0) computes with a packed copy of the head, which it packs anew only where the head
    has weights of its own: after a reload the old head would draw.
    """
    from safetensors.torch import load_file, save_file

    tied, index = getattr(model, "all_tied_weights_keys", None) or {}, dict[str, str]()
    if not tied:
        return
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if copies := {name: tensors[source].clone() for name, source in tied.items() if source in tensors}:
            save_file(tensors | copies, file, metadata={"format": "pt"})
            index |= dict.fromkeys(copies, file.name)
    listed = folder / "model.safetensors.index.json"
    if listed.is_file():
        content = json_core.load_object(listed.read_bytes())
        content["weight_map"] |= index
        listed.write_text(json.dumps(content), encoding="utf-8")
    config = json_core.load_object((folder / "config.json").read_bytes()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _is_writer(trainer: Any, section: VllmEngine) -> bool:
    """Return whether a process writes the weights: the first of its node, or of all for a server that is
    there."""
    args = trainer.args
    return (args.local_process_index if section.address is None else args.process_index) == 0


def kept_servers(trainer: Any, section: VllmEngine) -> Sequence[int]:
    """Return the numbers of the servers that a process looks after: of GPUs that draw alone, those that fall
    to it; the one on the GPU that it trains on; or the only one, which the process that writes has."""
    place = trainer.args.local_process_index
    if section.gpus:
        return range(place, section.gpus, trainer.run.plan.processes)
    if _shares_gpu(trainer, section):
        return [place]
    return [0] if _is_writer(trainer, section) else []


def gpu_of(trainer: Any, section: VllmEngine, number: int) -> int | None:
    """Return the GPU of a server among those that its process sees: behind those that train, or the one on
    which its process trains; None on CPUs."""
    if section.gpus:
        return trainer.run.plan.processes + number
    index: int | None = trainer.args.device.index
    return index


def parts_of(answers: int, place: int, processes: int, servers: int) -> list[slice]:
    """Return what each server draws of the answers of one of several processes, each of which wants as many:
    the servers draw equally many, and each those that follow each other."""
    borders = [number * processes * answers // servers - place * answers for number in range(servers + 1)]
    inside = [min(max(border, 0), answers) for border in borders]
    return [slice(start, end) for start, end in itertools.pairwise(inside)]


def _together(function: Callable[[int], _Result], numbers: Sequence[int]) -> list[_Result]:
    """Return a function's results of several servers, which it asks at the same time."""
    with ThreadPoolExecutor(max(1, len(numbers)), thread_name_prefix="servers") as threads:
        return list(threads.map(function, numbers))


def _shares_gpu(trainer: Any, section: VllmEngine) -> bool:
    """Return whether the server that the run starts is on the GPU that trains."""
    return section.shares_gpus and trainer.args.device.type == "cuda"


def _of_node(trainer: Any, section: VllmEngine, mine: Sequence[Server]) -> list[Server]:
    """Return the servers of this process's node in their order, or the only one."""
    every = gathered(trainer, [list(mine)])
    if section.address is None:
        first = trainer.args.process_index - trainer.args.local_process_index
        every = every[first : first + trainer.run.plan.processes]
    return sorted(server for servers in every for server in servers)


def _nearest(trainer: Any, mine: _Result | None) -> _Result:
    """Return what this process has, or else the last one before it, which is on its node, or the only one."""
    every = gathered(trainer, [mine])
    return next(value for value in reversed(every[: trainer.args.process_index + 1]) if value is not None)


def _scored(
    trainer: Any, wanted: Sequence[WantedAnswer], drawn: Sequence[Completion], pad: int, at_a_time: int
) -> list[Completion]:
    """Return the answers with the trained model's log-probabilities."""
    scored = list[Completion]()
    for start in range(0, len(drawn), at_a_time):
        part = drawn[start : start + at_a_time]
        prompts = [list(answer.prompt) for answer in wanted[start : start + at_a_time]]
        batch = {
            "prompt_ids": padded(prompts, pad, left=True),
            "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], 0, left=True),
            "completion_ids": padded([answer.tokens for answer in part], pad),
            "completion_mask": padded([[1] * len(answer.tokens) for answer in part], 0),
        }
        rows = trainer.trained_log_probs(with_attention(batch)).tolist()
        scored += [
            answer._replace(trained_log_probs=row[: len(answer.tokens)])
            for answer, row in zip(part, rows, strict=True)
        ]
    return scored


def _check_near(trainer: Any, answers: Sequence[Completion], bound: float) -> None:
    """Check that the log-probabilities of both engines are near to each other, over all processes.

    Raises:
        TrainingError: they are not.
    """
    pairs = [
        pair for answer in answers for pair in zip(answer.log_probs, answer.trained_log_probs, strict=True)
    ]
    mine = (
        sum(abs(engine_value - other) for engine_value, other in pairs),
        sum(engine_value for engine_value, _ in pairs),
        sum(other for _, other in pairs),
        len(pairs),
    )
    columns = zip(*gathered(trainer, [mine]), strict=True)
    distance, engine, trained, tokens = (sum(column) for column in columns)
    if not distance <= bound * tokens:
        raise TrainingError(
            "vLLM draws by other weights than the trained ones: the mean log-probability of its "
            f"{counted(tokens, 'token')} is {engine / tokens:.4f} nats, and the trained model's "
            f"{trained / tokens:.4f}; the mean distance is {distance / tokens:.2g} (bound {bound:g}). "
            "Nothing of this step is trained. Start the server with the recipe's base model, in model.dtype"
        )


def draw_evaluated(
    trainer: Any, prompts: Sequence[Sequence[int]], uniforms: Sequence[Any], drawing: Drawing
) -> list[Completion]:
    """Return the answers that the trained model draws, as `draw` does. All processes call it."""
    with evaluated(trainer, trainer.model):
        return draw(trainer.model, prompts, uniforms, drawing, _any_of_all(trainer))


@contextmanager
def evaluated(trainer: Any, model: Any) -> Iterator[None]:
    """Run a model within the block as the trainer does, without dropout and gradients."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            yield
    finally:
        model.train(was_training)


def _any_of_all(trainer: Any) -> Callable[[bool], bool]:
    """Return a function that all processes call, and that returns whether one of them got True."""
    if trainer.args.world_size == 1:
        return bool
    import torch

    def any_of_all(mine: bool) -> bool:
        flag = torch.tensor([int(mine)], device=trainer.args.device)
        return bool(trainer.accelerator.reduce(flag, reduction="sum").item())

    return any_of_all


def gathered(trainer: Any, mine: list[Any]) -> list[Any]:
    """Return the lists of all processes, one after the other."""
    from accelerate.utils import gather_object

    return list(gather_object(mine))


def with_attention(batch: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's batch of prompts and completions with the mask of both."""
    import torch

    return batch | {"attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)}
