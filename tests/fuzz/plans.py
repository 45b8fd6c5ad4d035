"""Plans, compared with arithmetic by hand: of drawn models, layouts, shapes and accelerators."""

import contextlib
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from flytune.console import tables
from flytune.errors import DoesNotFit, FlytuneError
from flytune.hardware import accelerators, load_cluster, load_shapes
from flytune.planning import planner, table
from flytune.planning.base_sizes import read_geometry
from flytune.pods import Image, security
from flytune.recipe import Recipe
from flytune.records import Plan
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import damaged, documents, with_bomb, with_equal_keys, with_secret, yaml_bytes
from tests.fuzz.oracles import (
    equal_keys,
    llama_parameters,
    plain_yaml,
    refuse_dropped,
    refuse_shown,
    shape_row,
)
from tests.support.paths import ROOT

GIB = 2**30
_NEAR = 1.001
"""Rounding."""


def check_plan(
    plan: Plan, recipe: Recipe, row: dict[str, Any], config: dict[str, Any], samples: int | None
) -> None:
    """Compare a plan with arithmetic by hand, from the model's config.json and a row of shapes.yaml.

    Raises:
        Wrong: a figure is not what follows from them, or is below what is needed in any case.
    """
    if Plan.model_validate_json(plan.model_dump_json()) != plan:
        raise Wrong("JSON reads back another plan")
    nodes, batch = int(row["nodes"]), recipe.training.global_batch_size
    processes = 1 if recipe.sharding.name == "device_map" else int(row["processes"])
    equal = {
        "nodes": (plan.nodes, nodes),
        "processes": (plan.processes, processes),
        "world size": (plan.world_size, nodes * processes),
        "global batch": (plan.global_batch_size, batch),
        "micro batch x accumulation x processes": (
            plan.per_device_train_batch_size * plan.gradient_accumulation_steps * nodes * processes,
            batch,
        ),
        "price": (plan.price_per_hour, nodes * float(row["price_per_hour"])),
        "parameters": (plan.total_parameters, _parameters(recipe, config) or plan.total_parameters),
        "trained": (plan.trained_parameters, _trained(recipe, config) or plan.trained_parameters),
        "steps": (plan.steps, _steps(recipe, samples)),
    }
    if wrong := [
        f"{name}: {found}, and {wanted} by hand" for name, (found, wanted) in equal.items() if found != wanted
    ]:
        raise Wrong("; ".join(wrong))
    memory, has = plan.needs[0], (float(row["gpu_memory_gib"]) or float(row["memory_gib"])) * GIB
    peak = max(sum(parts.values()) for parts in memory.phases.values())
    least = least_bytes(recipe, config, nodes * int(row["processes"]))
    if memory.available_bytes > has * _NEAR or peak > memory.available_bytes or peak * _NEAR < least:
        raise Wrong(
            f"{peak / GIB:.2f} of {memory.available_bytes / GIB:.2f} GiB; by hand at least {least / GIB:.2f} "
            f"of {has / GIB:.2f}"
        )
    if any(
        sum(parts.values()) > need.available_bytes for need in plan.needs for parts in need.phases.values()
    ):
        raise Wrong("a plan whose peak is above what there is")
    _check_time(plan, recipe, row, config)


def _parameters(recipe: Recipe, config: dict[str, Any]) -> int | None:
    """Return the model's parameters by hand; None where tokens are added to it, or its head is another
    one."""
    is_other = recipe.model.extra_special_tokens or recipe.objective.head != "language_model"
    return None if is_other else llama_parameters(config)["all"]


def _trained(recipe: Recipe, config: dict[str, Any]) -> int | None:
    """Return the trained parameters by hand; None where the adapter is not a plain one of all linear
    layers."""
    counted, method = llama_parameters(config), recipe.method
    if method.name == "full" or _parameters(recipe, config) is None:
        return _parameters(recipe, config)
    changed = method.model_fields_set - {"name", "r", "lora_alpha", "lora_dropout"}
    other = any(getattr(method, name) != type(method).model_fields[name].default for name in changed)
    return None if other else method.r * counted["in+out"]


def _steps(recipe: Recipe, samples: int | None) -> int | None:
    """Return the steps by hand: batches go on over the ends of epochs, and the last one may be short."""
    training = recipe.training
    if training.max_steps or samples is None:
        return training.max_steps
    return math.ceil(Fraction(str(training.num_train_epochs)) * samples / training.global_batch_size)


def least_bytes(recipe: Recipe, config: dict[str, Any], shares: int) -> float:
    """Return the bytes that a process needs in any case: its share of weights, gradients and AdamW's two
    moments."""
    counted, name, training = llama_parameters(config), recipe.sharding.name, recipe.training
    of_dtype = 4 if recipe.model.dtype == "float32" else 2
    weights = counted["all"] * of_dtype
    if recipe.method.name == "qlora":
        weights = counted["linear"] / 2 + (counted["all"] - counted["linear"]) * of_dtype
    if recipe.sharding.offload != "none":
        return 0.0
    is_split = name in ("zero3", "fsdp", "device_map")
    if recipe.method.name == "full" and training.optim in ("auto", "adamw_torch", "adamw_torch_fused"):
        moments = 8 if training.master_dtype == "float32" else 4
        gradients = masters = 4 if training.master_dtype == "float32" else 2
        if name in ("none", "ddp"):
            return counted["all"] * float(masters + gradients + moments)
        return counted["all"] * float(masters + moments) / shares + (0 if is_split else weights)
    return weights / shares if is_split else weights


def _check_time(plan: Plan, recipe: Recipe, row: dict[str, Any], config: dict[str, Any]) -> None:
    """Compare time and price with the operations that a step has at least, at the peak rate of its
    accelerators."""
    seconds = sum(plan.step_seconds.values())
    if plan.step_seconds:
        rates = {
            accelerator.name: max(accelerator.tflops, accelerator.matmul_tflops)
            for accelerator in accelerators.load_accelerators().values()
        }
        tokens = recipe.training.global_batch_size * recipe.data.max_length
        times = 6 if recipe.method.name == "full" else 4
        operations = times * llama_parameters(config)["linear"] * tokens
        gpus = int(row["nodes"]) * int(row["processes"])
        least = operations / (gpus * rates[row["accelerator"]] * 1e12)
        if seconds * _NEAR < least:
            raise Wrong(
                f"a step of {seconds:.3g} s, and {least:.3g} s by hand at the peak rate of "
                f"{row['accelerator']}"
            )
        rate = tokens / seconds
        if not rate / _NEAR <= plan.tokens_per_second[1] <= rate * _NEAR:
            raise Wrong(f"{plan.tokens_per_second[1]:.5g} tokens per second, and {rate:.5g} by hand")
    if plan.hours:
        hours = seconds * (plan.steps or 0) / 3600
        if not hours / _NEAR <= plan.hours[1] <= hours * _NEAR:
            raise Wrong(f"{plan.hours[1]:.5g} hours, and {hours:.5g} by hand")
        wanted = [hour * plan.price_per_hour for hour in plan.hours]
        if any(abs(price - one) > 1e-9 * one for price, one in zip(plan.price, wanted, strict=True)):
            raise Wrong(f"prices of {plan.price}, and {wanted} by hand")


_MODELS = st.fixed_dictionaries(
    {
        "hidden_size": st.sampled_from([256, 1024, 2048, 4096, 8192]),
        "intermediate_size": st.sampled_from([512, 4096, 11008, 14336, 28672]),
        "num_hidden_layers": st.sampled_from([2, 16, 32, 80]),
        "num_attention_heads": st.sampled_from([8, 32, 64]),
        "num_key_value_heads": st.sampled_from([1, 4, 8]),
        "vocab_size": st.sampled_from([512, 32000, 128256]),
        "tie_word_embeddings": st.booleans(),
    }
)
_LAYOUTS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["full", "full", "lora", "qlora"]),
        "sharding": st.sampled_from(["none", "none", "ddp", "zero1", "zero2", "zero3", "fsdp", "device_map"]),
        "model.dtype": st.sampled_from(["bfloat16", "float32", "float16"]),
        "hardware": st.sampled_from(
            [
                "cpu-1",
                "cpu-2",
                "t4-1",
                "l4-1",
                "a10g-8",
                "a100-80gb-1",
                "a100-80gb-8",
                "a100-80gb-8x2",
                "h100-8",
                "h100-8x8",
            ]
        ).map(lambda name: {"shape": name}),
        "data.max_length": st.sampled_from([128, 1024, 8192]),
        "training.global_batch_size": st.sampled_from([1, 8, 48, 64, 512]),
        "training.num_train_epochs": st.sampled_from([1.0, 2.0, 3.0]),
        "training.max_steps": st.sampled_from([None, 7, 1000]),
        "training.activation_checkpointing": st.booleans(),
    }
)
_RATES = st.sampled_from([1.0, 1.0, 0.01, 100.0])


@kind("plan", lambda samples: st.tuples(_MODELS, _LAYOUTS, _RATES, st.sampled_from([None, 20, 999, 100_000])))
def check_made(
    samples: Samples, given: tuple[dict[str, Any], dict[str, Any], float, int | None], folder: Path
) -> None:
    """A plan has what follows by hand from config.json, shapes.yaml and accelerators.yaml; what is small
    enough fits."""
    sizes, layout, rate, count = given
    config = samples.config() | sizes | {"head_dim": sizes["hidden_size"] // sizes["num_attention_heads"]}
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = yaml.safe_load((ROOT / "accelerators.yaml").read_bytes())
    for row in rows:
        row |= {
            name: row[name] * rate
            for name in ("tflops", "float32_tflops", "matmul_tflops", "attention_tflops")
        }
    found = _of_file(rows, folder)
    accelerators.load_accelerators = lambda *path: found  # type: ignore[assignment]  # in this process alone
    recipe = Recipe.model_validate(samples.recipe(**{"model.name_or_path": str(folder / "base"), **layout}))
    row = shape_row(recipe.hardware.shape)
    try:
        made = planner.make(recipe, samples=count)
    except DoesNotFit:
        if _must_fit(recipe, config, row):
            raise Wrong(f"{recipe.hardware.shape} is refused, and has many times what is needed") from None
        raise
    check_plan(made, recipe, row, config, count)
    if sum(made.step_seconds.values()) > 60 * made.gradient_accumulation_steps / min(rate, 1):
        raise Wrong(f"a step of {sum(made.step_seconds.values()):.3g} s")
    table.show(made, tables.console())


def _of_file(rows: list[dict[str, Any]], folder: Path) -> Any:
    """Return what is read of a file of accelerators, all of whose figures must be there."""
    (folder / "accelerators.yaml").write_text(yaml.dump(rows), encoding="utf-8")
    found = accelerators.load_accelerators(folder / "accelerators.yaml")
    refuse_dropped(
        {row["name"]: row for row in rows},
        {name: one.model_dump() for name, one in found.items()},
        "accelerators",
    )
    return found


def _must_fit(recipe: Recipe, config: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether a GPU has room for several times the weights, gradients, moments and activations of one
    sample."""
    processes = int(row["nodes"]) * int(row["processes"])
    fits_layout = (recipe.sharding.name == "none") == (
        processes == 1
    ) and recipe.training.global_batch_size % processes == 0
    if not row["gpu_memory_gib"] or not fits_layout or recipe.sharding.name == "device_map":
        return False
    states = 20 * llama_parameters(config)["all"]
    width = config["hidden_size"] * 20 + config["intermediate_size"] * 10
    activations = (
        4 * recipe.data.max_length * (config["num_hidden_layers"] * width + 8 * config["vocab_size"])
    )
    attention = 8 * config["num_attention_heads"] * recipe.data.max_length**2
    most = 6 * GIB + 2 * (states + activations + attention)
    bf16 = row.get("bf16", True) or recipe.model.dtype != "bfloat16"
    return bool(
        bf16 and most < row["gpu_memory_gib"] * GIB and most * row["processes"] < row["memory_gib"] * GIB
    )


def rows_of(name: str) -> Any:
    """Return the content of a file of hardware as it is shipped."""
    return yaml.safe_load((ROOT / name).read_bytes())


def _hardware(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    cluster = {
        **rows_of("cluster.yaml"),
        "volumes": [
            {
                "name": "a",
                "nfs": {"server": "10.0.0.2", "path": "/m"},
                "mount_path": "/mnt/models",
                "read_gbs": 1.2,
            },
            {
                "name": "b",
                "persistent_volume_claim": "c",
                "mount_path": "/mnt/b",
                "shapes": ["h100-8"],
                "light_tasks": False,
            },
        ],
        "model_cache": "/mnt/models/hub",
        "store_read_gbs": 0.5,
    }
    shapes = rows_of("shapes.yaml")
    valid = {
        "shapes.yaml": [shapes, shapes[:2] + shapes[-3:]],
        "accelerators.yaml": [rows_of("accelerators.yaml")],
    }
    names = st.sampled_from(["shapes.yaml", "accelerators.yaml"])
    twice = names.flatmap(
        lambda name: st.tuples(
            st.just(name), st.sampled_from(valid[name][0]).map(lambda row: yaml_bytes([*valid[name][0], row]))
        )
    )
    first, second = cluster["volumes"]
    unknown = st.sampled_from([["h100-8", "x"], ["H100-8"]]).map(
        lambda shapes: (
            "cluster.yaml",
            yaml_bytes(cluster | {"volumes": [first, second | {"shapes": shapes}]}),
        )
    )
    any_file = st.one_of(names, st.just("cluster.yaml"))
    whole = any_file.flatmap(lambda name: st.tuples(st.just(name), texts(valid.get(name, [cluster]))))
    return st.one_of(*[whole] * 8, twice, unknown)


def texts(valid: list[Any]) -> st.SearchStrategy[bytes]:
    """Draw the bytes of a YAML file: a mutated document, sometimes damaged as well, or with equal keys or a
    credential."""
    of_valid = st.sampled_from(valid)
    return st.one_of(
        of_valid.flatmap(documents).map(yaml_bytes).flatmap(lambda text: damaged(text, often=0.25)),
        of_valid.flatmap(documents).map(yaml_bytes).flatmap(lambda text: damaged(text, often=0.25)),
        of_valid.map(yaml_bytes).flatmap(with_equal_keys),
        of_valid.map(yaml_bytes).flatmap(with_bomb),
        of_valid.flatmap(with_secret).map(yaml_bytes),
    )


@kind("hardware", _hardware)
def check_hardware(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A file of hardware that is accepted is read whole, and is one that recipes are planned with."""
    name, content = given
    file = folder / name
    file.write_bytes(content)
    geometry = read_geometry(Recipe.model_validate(samples.recipe()).model)
    recipes = [
        Recipe.model_validate(
            samples.recipe(**{"hardware": hardware, "sharding": sharding, "training.global_batch_size": 64})
        )
        for hardware, sharding in (
            ({"shape": "cpu-1"}, "none"),
            ({"shape": "auto", "accelerator": "H100"}, "none"),
            ({"shape": "auto", "accelerator": "H100"}, "fsdp"),
        )
    ]
    shapes, cluster, read = None, None, Any
    if name == "shapes.yaml":
        shapes = load_shapes(file)
        read = [shape.model_dump() for shape in shapes]
    elif name == "accelerators.yaml":
        found = accelerators.load_accelerators(file)
        read = [one.model_dump() for one in found.values()]
        accelerators.load_accelerators = lambda *path: found  # type: ignore[assignment]  # in this process alone
    else:
        cluster = load_cluster(file)
        content = (
            content if plain_yaml(content) is not None else b"{}"
        )  # of comments alone, as the shipped one may be
        read = cluster.model_dump()
        _check_pod(cluster, plain_yaml(content))
        cluster.check_shapes({shape.name for shape in load_shapes()})
        if unknown := {name for volume in cluster.volumes for name in volume.shapes} - {
            row["name"] for row in rows_of("shapes.yaml")
        }:
            raise Wrong(f"volumes of shapes that are not there: {sorted(unknown)!r:.100}")
    check_accepted(content, read, folder)
    rows = {
        row["name"]: {"nodes": 1, "gpu_memory_gib": 0} | row
        for row in ((shapes and read) or rows_of("shapes.yaml"))
    }
    for recipe in recipes:
        with contextlib.suppress(FlytuneError):
            made = planner.make(recipe, shapes, geometry, samples=20, cluster=cluster)
            check_plan(made, recipe, rows[made.shape], samples.config(), 20)
            table.show(made, tables.console())


def _check_pod(cluster: Any, written: Any) -> None:
    """Compare a pod with the rules of Kubernetes' policy `restricted`, as far as cluster.yaml does not turn
    them off.

    Raises:
        Wrong: the pod may more than that.
    """
    from kubernetes.client import V1Container, V1PodSpec

    rules = written.get("pod_security") if isinstance(written, dict) else None
    rules = rules if isinstance(rules, dict) else {}
    spec = security.restrict(
        V1PodSpec(containers=[V1Container(name="primary")]), cluster, [], Image(True, "/app")
    )
    container, pod = spec.containers[0].security_context, spec.security_context
    if rules.get("restricted", "true") == "true" and not (
        container is not None
        and container.allow_privilege_escalation is False
        and container.capabilities.drop == ["ALL"]
        and not container.capabilities.add
        and pod.seccomp_profile.type == "RuntimeDefault"
    ):
        raise Wrong("a pod that is not restricted")
    if rules.get("read_only_root", "true") == "true" and not (
        container and container.read_only_root_filesystem
    ):
        raise Wrong("a pod whose root can be written")
    if (
        rules.get("service_account_token", "false") == "false"
        and spec.automount_service_account_token is not False
    ):
        raise Wrong("a pod with a token of Kubernetes")


def check_accepted(content: bytes, read: Any, folder: Path) -> None:
    """Compare a YAML file that was accepted with what was read of it.

    Raises:
        Wrong: it has equal keys or a credential, and should have been refused; or something of it was
        dropped.
    """
    if twice := equal_keys(content):
        raise Wrong(f"accepted, although {twice:.60} is there twice")
    refuse_shown(content.decode("utf-8-sig"))
    written = plain_yaml(content)
    if isinstance(written, list):  # rows by name: they are sorted
        if len({row["name"] for row in written}) < len(written):
            raise Wrong("two rows have the same name")
        written, read = ({row["name"]: row for row in rows} for rows in (written, read))
    refuse_dropped(written, read, "accepted")
