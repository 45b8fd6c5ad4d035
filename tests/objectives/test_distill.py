"""Distillation into a tiny base: TRL's own losses on the same batches, and a teacher that is proved."""

import json
import shutil

import pytest

from flytune import data
from flytune.errors import DataError, DoesNotFit, RecipeError
from flytune.evaluation import score
from flytune.hardware import shape_named
from flytune.objectives import distill
from flytune.planning import planner
from flytune.recipe import DataRequest, Distill, Recipe
from flytune.training import loop, reference
from flytune.training.checkpoints import saver
from tests.support import changed_base, distilled, objective_runs, ranks
from tests.support.objective_runs import TEACHER
from tests.support.saved_runs import KNOWN
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("distilled"), "distill", write_pairs)


def recipe_for(inputs, *arguments, **fields):
    section = objective_runs.section_of("distill", inputs) | fields.pop("objective", {})
    return objective_runs.recipe_for(inputs, "distill", *arguments, objective=section, **fields)


@pytest.fixture
def experimental(monkeypatch):
    """Let TRL's experimental trainers be imported without their warning."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def section_for(**fields):
    return Distill.model_validate({"name": "distill", "teacher_model_name_or_path": "t"} | fields)


def drawn(tokens=7, vocabulary=50):
    """Return the logits of a student and a teacher, and the data's tokens."""
    import torch

    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(tokens, vocabulary, generator=draw) * 2 for _ in range(2))
    return student, teacher, torch.randint(vocabulary, (tokens,), generator=draw)


def losses_of(section, student, teacher, wanted):
    best = (teacher / section.temperature).log_softmax(dim=1).topk(section.loss_top_k, dim=1)
    return distill.tile_losses(student, wanted, best.indices, best.values, section)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_of_all_tokens_it_is_the_loss_of_trls_trainers(beta, temperature, experimental):
    import torch
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    student, teacher, wanted = drawn()
    student.requires_grad_(True)
    section = section_for(loss_top_k=50, beta=beta, temperature=temperature)
    ours = losses_of(section, student, teacher, wanted).mean()
    [slope] = torch.autograd.grad(ours, student)
    of_gkd = GKDTrainer.generalized_jsd_loss(student, teacher, None, beta, temperature, num_items_in_batch=7)
    [slope_of_gkd] = torch.autograd.grad(of_gkd, student)
    assert ours.item() == pytest.approx(of_gkd.item(), rel=1e-5)
    assert torch.allclose(slope, slope_of_gkd, rtol=1e-4, atol=1e-7)
    # With identity matrices as heads the hidden states are the logits.
    head, mask = torch.eye(50), torch.ones(1, 7)
    of_trl, _, _ = _chunked_divergence_loss(
        student.detach()[None], teacher[None], head, head, mask, beta, temperature=temperature
    )
    assert ours.item() == pytest.approx(of_trl.item(), rel=1e-5)


def test_of_some_tokens_it_is_that_of_trls_trainer_with_the_tail(experimental):
    import torch
    from trl.experimental.server_distillation import server_distillation_trainer as of_trl

    student, teacher, wanted = drawn()
    best = teacher.log_softmax(dim=1).topk(5, dim=1)
    for beta in (0.0, 0.5, 1.0):
        section = section_for(loss_top_k=5, beta=beta)
        ours = distill.tile_losses(student, wanted, best.indices, best.values, section)
        known = torch.ones(7, 5, dtype=torch.bool)
        sparse, support = of_trl._add_tail_bucket(student.log_softmax(dim=1).gather(1, best.indices), known)
        of_teacher, _ = of_trl._add_tail_bucket(best.values, known)
        theirs = of_trl._jsd_divergence(sparse, of_teacher, beta, support).sum(dim=-1)
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-4)


def losses_of_ours(recipe, inputs, known, out):
    plan = planner.make(recipe)
    result = loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out, reference=known)
    return [(step.loss, step.grad_norm) for step in result.steps]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_has_the_losses_and_gradients_of_gkd(method, inputs, tmp_path, experimental):
    # All tokens of the vocabulary, and no clipping, which would hide a factor of the gradients.
    section = {"loss_top_k": 1024, "beta": 0.5}
    recipe = recipe_for(inputs, method, objective=section, **{"training.max_grad_norm": 100.0})
    ranks.run(1, reference.compute, recipe, inputs / "dataset", tmp_path / "known")
    ours = ranks.run(1, losses_of_ours, recipe, inputs, tmp_path / "known", tmp_path / "ours")
    rows = distilled.rows_of(recipe, inputs)
    theirs = ranks.run(1, distilled.losses_of_gkd, recipe, rows, inputs, tmp_path / "theirs")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


def test_a_student_that_likes_other_tokens_has_a_loss_even_of_one_token():
    import torch

    section = section_for(loss_top_k=1)
    ids, log_probs = torch.tensor([[0]]), torch.log(torch.tensor([[0.5]]))
    same, other = torch.tensor([[0.0, 0.0, -30.0]]), torch.tensor([[-30.0, 0.0, 0.0]])
    wanted = torch.tensor([0])
    assert float(distill.tile_losses(same, wanted, ids, log_probs, section)) == pytest.approx(0.0, abs=1e-6)
    assert float(distill.tile_losses(other, wanted, ids, log_probs, section)) > 5


def test_alpha_is_the_weight_of_the_datas_own_loss():
    import torch

    student, teacher, wanted = drawn()
    divergence, half = (
        losses_of(section_for(alpha=alpha, loss_top_k=5), student, teacher, wanted) for alpha in (0.0, 0.5)
    )
    own = torch.nn.functional.cross_entropy(student, wanted, reduction="none")
    assert half.tolist() == pytest.approx((0.5 * divergence + 0.5 * own).tolist(), rel=1e-5)


def columns_of(recipe, inputs, row):
    """Return the teacher's columns of a training row, and its logits for that row by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    found = reference.Reference(inputs / KNOWN, recipe, data.read_manifest(inputs / "dataset").content_sha256)
    stored = found.beside(data.load(inputs / "dataset", "train"))[row]
    model = AutoModelForCausalLM.from_pretrained(inputs / TEACHER, dtype="float32").eval()
    with torch.no_grad():
        logits = model(torch.tensor([stored["input_ids"]])).logits[0, :-1]
    trained = torch.tensor(stored["labels"][1:]) != -100
    wanted = torch.tensor(stored["labels"][1:])[trained]
    log_probs = logits[trained].log_softmax(dim=1)
    best = log_probs.topk(8, dim=1)
    nll = -log_probs.gather(1, wanted[:, None])[:, 0]
    return stored, best.indices.flatten().tolist(), best.values.flatten().tolist(), nll.tolist()


def test_the_rows_have_the_teachers_tokens_of_each_trained_token(inputs):
    for row in (0, 5):
        stored, ids, log_probs, nll = ranks.run(1, columns_of, recipe_for(inputs), inputs, row)
        assert stored["teacher_ids"] == ids
        assert stored["teacher_log_probs"] == pytest.approx(log_probs, abs=1e-4)
        assert stored["teacher_nll"] == pytest.approx(nll, abs=1e-4)


def test_the_students_loss_falls_and_the_record_has_the_teachers(inputs, tmp_path):
    recipe = recipe_for(inputs, "lora", **{"training.max_steps": 8, "training.learning_rate": 3e-3})
    result = ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / "out")
    assert result.steps[-1].loss < 0.8 * result.steps[0].loss
    assert result.teacher_loss > 0
    metrics = ranks.run(1, scored, recipe, tmp_path / "out", inputs)
    assert [figure.name for figure in metrics.figures] == ["perplexity", "loss"]
    card = objective_runs.card_of(recipe, result, tmp_path / "out", inputs, metrics)
    assert "Distilled from a teacher" in card
    assert f"Its own held-out loss is {result.teacher_loss:#.3g} nats per token" in card


def scored(recipe, out, inputs):
    return score.score(recipe, out, inputs / "dataset")


@pytest.mark.parametrize("changed", ["vocabulary", "merges"])
def test_a_teacher_with_another_tokenizer_is_refused(changed, inputs, tmp_path):
    teacher = shutil.copytree(inputs / TEACHER, tmp_path / "teacher")
    content = json.loads((teacher / "tokenizer.json").read_text())
    if changed == "vocabulary":
        tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)[-2:]
        vocabulary = content["model"]["vocab"]
        vocabulary[tokens[0]], vocabulary[tokens[1]] = vocabulary[tokens[1]], vocabulary[tokens[0]]
    else:
        content["model"]["merges"] = content["model"]["merges"][::-1]
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    recipe = recipe_for(inputs, objective={"teacher_model_name_or_path": str(teacher)})
    words = "is .* in one of them alone" if changed == "vocabulary" else "they make other tokens of"
    with pytest.raises(ranks.RankFailed, match=words):
        ranks.run(1, reference.compute, recipe, inputs / "dataset", tmp_path / "out")


def test_tokens_of_another_teacher_or_number_are_refused(inputs, tmp_path):
    content = data.read_manifest(inputs / "dataset").content_sha256
    for changes in ({"loss_top_k": 4}, {"temperature": 2.0}, {"teacher_model_name_or_path": "elsewhere"}):
        with pytest.raises(DataError, match="are of another model, or of other rows"):
            reference.Reference(inputs / KNOWN, recipe_for(inputs, objective=changes), content)
    reference.Reference(inputs / KNOWN, recipe_for(inputs, objective={"alpha": 0.5, "beta": 1.0}), content)


def test_another_content_of_the_teacher_is_another_start(tmp_path):
    base = tiny_base(tmp_path)
    teacher = changed_base.write_teacher(base, tmp_path / "teacher")
    section = {"name": "distill", "teacher_model_name_or_path": str(teacher)}
    recipe = Recipe.model_validate(tiny_recipe(base, tmp_path / "rows.jsonl", {"objective": section}))
    identities = [reference.frozen_model(recipe).identity()]
    changed_base.change_weights(teacher)
    identities.append(reference.frozen_model(recipe).identity())
    starts = [saver._base_of(recipe, identity) for identity in identities]
    assert starts[0] != starts[1]
    assert {start.partition(" + teacher ")[0] for start in starts} == {saver._base_of(recipe, "")}


def test_the_cache_follows_from_teacher_and_number_and_not_from_the_student(inputs):
    def key(**changes):
        recipe = recipe_for(inputs, **changes)
        base = reference.BaseRequest(name_or_path=recipe.model.name_or_path)
        [request] = reference.requests(recipe, DataRequest.of(recipe, "x"), base)
        return request.model_dump_json(exclude={"request"})

    assert key() == key(method="lora") == key(**{"training.learning_rate": 1e-5})
    assert key() != key(objective={"loss_top_k": 4})
    assert key() != key(objective={"teacher_model_name_or_path": str(inputs / "tiny")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "distill"}, "teacher_model_name_or_path: missing"),
        ({"data.packing": True}, "a packed block has several"),
        ({"model.trust_remote_code": True}, "executes no code of a model's own"),
        ({"data.format": "preference"}, "has two answers in a row"),
        ({"objective": {"name": "distill", "alpha": 1.0}}, "alpha"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(changes, message, inputs):
    changes = {"objective": objective_runs.section_of("distill", inputs)} | changes
    with pytest.raises((RecipeError, DoesNotFit, ValueError), match=message):
        planner.make(Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes)))
