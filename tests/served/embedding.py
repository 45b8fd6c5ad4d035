"""Embedding models in sentence-transformers and vLLM: their vectors must have the loss that the live model
had."""

import json
import math
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.served import environments, servers
from tests.served.models import Models, flytune
from tests.support.encoders import write_encoder
from tests.support.queries import write_queries
from tests.support.tiny import tiny_recipe

SECTION: dict[str, Any] = {
    "name": "embed",
    "negatives": 1,
    "query_prompt": "search: ",
    "document_prompt": "text: ",
}
TEMPERATURE = 0.05
BOUND = 1e-3
"""Largest relative difference of the losses, in float32."""
HELDOUT = 8
"""Held-out rows, all of which the gate scores."""
_PROGRAM = """
import json, sys
from sentence_transformers import SentenceTransformer

folder, texts = sys.argv[1], json.load(open(sys.argv[2]))
model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": "float32"})
vectors = [model.encode_query(texts["queries"]), model.encode_document(texts["documents"])]
json.dump([part.tolist() for part in vectors], open(sys.argv[3], "w"))
"""


def full(models: Models, folder: Path) -> str:
    """Return how the vectors of a model whose weights were all trained differ; empty if they do not."""
    artifact, loss = _trained(models, folder, "full")
    return _problem(models, folder, artifact, loss)


def adapter(models: Models, folder: Path) -> str:
    """Return the same of an adapter on its base, and of both merged."""
    artifact, loss = _trained(models, folder, "lora")
    merged = folder / "merged"
    done = flytune("merge", str(artifact), "--out", str(merged))
    if done.returncode:
        return done.stderr[-2000:]
    return _problem(models, folder, artifact, loss) or _problem(models, folder, merged, loss)


def served(models: Models, folder: Path) -> str:
    """Return the same of vLLM's vectors of a model whose weights were all trained."""
    return _served(models, folder, *_trained(models, folder, "full"))


def encoder_served(models: Models, folder: Path) -> str:
    """Return the same of vLLM's vectors of an encoder."""
    base = write_encoder(folder / "encoder", "xlm-roberta")
    return _served(models, folder, *_trained(models, folder, "full", base, "mean"))


def _served(models: Models, folder: Path, artifact: Path, loss: float) -> str:
    queries, documents = _texts(folder)
    words = ["--model", str(artifact), "--served-model-name", "full", "--runner", "pooling"]
    words += ["--max-model-len", "128"]
    prompts = [SECTION["query_prompt"]] * len(queries) + [SECTION["document_prompt"]] * len(documents)
    texts = [f"{prompt}{text}" for prompt, text in zip(prompts, queries + documents, strict=True)]
    with servers.vllm(environments.vllm(models.environment), words, folder / "vllm.log") as address:
        asked = json.dumps({"model": "full", "input": texts}).encode()
        request = urllib.request.Request(
            f"{address}/v1/embeddings", asked, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            vectors = [item["embedding"] for item in json.load(answer)["data"]]
    return _difference(_loss(vectors[: len(queries)], vectors[len(queries) :]), loss, "vLLM")


def encoder(models: Models, folder: Path) -> str:
    """Return how the vectors of an encoder differ in sentence-transformers: of all its weights, and of an
    adapter and both merged."""
    base = write_encoder(folder / "encoder", "xlm-roberta")
    for pooling, method in (("mean", "full"), ("cls", "lora")):
        artifact, loss = _trained(models, folder, method, base, pooling)
        if problem := _problem(models, folder, artifact, loss):
            return f"{pooling}: {problem}"
    merged = folder / "merged"
    done = flytune("merge", str(artifact), "--out", str(merged))
    if done.returncode:
        return done.stderr[-2000:]
    return _problem(models, folder, merged, loss)


CASES: dict[str, Callable[[Models, Path], str]] = {
    "embedding-full": full,
    "embedding-adapter": adapter,
    "embedding-encoder": encoder,
    "embedding-vllm": served,
    "embedding-vllm-encoder": encoder_served,
}


def _trained(
    models: Models, folder: Path, method: str, base: Path | None = None, pooling: str = "last"
) -> tuple[Path, float]:
    """Return an artifact, and the loss of the live model on the held-out rows."""
    rows = write_queries(folder / "rows.jsonl", 64)
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    rows.write_text("".join(lines[HELDOUT:]), encoding="utf-8")
    heldout = rows.with_name("heldout.jsonl")
    heldout.write_text("".join(lines[:HELDOUT]), encoding="utf-8")
    section = SECTION | {"temperature": TEMPERATURE, "pooling": pooling}
    changes = {"name": method, "method": method, "objective": section}
    changes |= {"training.max_steps": 12, "training.learning_rate": 5e-3, "data.heldout_path": str(heldout)}
    recipe = tiny_recipe(base or models.base, rows, changes)
    del recipe["data"]["heldout_fraction"]
    file = folder / f"{method}.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = flytune("run", str(file), "--out", str(folder / "artifacts"))
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-1000:]}{done.stderr[-2000:]}")
    artifact = next((folder / "artifacts").glob(f"{method}-*"))
    return artifact, json.loads((artifact / "training.json").read_text())["heldout_loss"]


def _texts(folder: Path) -> tuple[list[str], list[str]]:
    """Return the held-out queries, and all documents, the own ones first."""
    rows = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    documents = [row["positive"] for row in rows] + [row["negatives"][0] for row in rows]
    return [row["query"] for row in rows], documents


def _problem(models: Models, folder: Path, model: Path, expected: float) -> str:
    """Return how the loss of sentence-transformers' vectors differs; empty if it does not."""
    queries, documents = _texts(folder)
    texts, answers = folder / "texts.json", folder / "vectors.json"
    texts.write_text(json.dumps({"queries": queries, "documents": documents}))
    python = environments.sentence_transformers(models.environment)
    command = [str(python), "-c", _PROGRAM, str(model), str(texts), str(answers)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-2000:]
    return _difference(_loss(*json.loads(answers.read_text())), expected, model.name)


def _difference(loss: float, expected: float, name: str) -> str:
    if math.isclose(loss, expected, rel_tol=BOUND):
        return ""
    return f"{name}: the loss is {loss}, and that of the live model was {expected}"


def _loss(queries: list[Any], documents: list[Any]) -> float:
    """Return the loss of queries whose own document has their place, by its definition."""
    total = 0.0
    for place, query in enumerate(queries):
        near = [
            sum(first * second for first, second in zip(query, document, strict=True)) / TEMPERATURE
            for document in documents
        ]
        total += math.log(sum(map(math.exp, near))) - near[place]
    return total / len(queries)
