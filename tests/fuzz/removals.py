"""Protections, each of which is removed by itself: an input that then fails shows that the fuzz test
notices."""

from tests.fuzz import weakened
from tests.fuzz.removing import Removal, each, instead, recoded, returns, schema, then

REMOVALS = [
    # What a person writes.
    Removal(
        "a DeepSpeed file is used",
        "flytune/sharding/zero.py",
        ("deepspeed",),
        instead(
            "flytune.sharding.zero:Zero.content",
            lambda old: property(
                lambda self: old.fget(
                    type(self)(
                        self.recipe.model_copy(
                            update={"sharding": self.recipe.sharding.model_copy(update={"config": None})}
                        )
                    )
                )
            ),
        ),
    ),
    Removal(
        "unknown keys are refused",
        "flytune/schema.py",
        ("recipe",),
        schema(("extra_behavior", "ignore"), ("extra_fields_behavior", "ignore")),
    ),
    Removal(
        "keys of DeepSpeed are known",
        "flytune/sharding/deepspeed_config.py",
        ("free_form",),
        instead("flytune.sharding.deepspeed_config:mistakes", returns([])),
    ),
    Removal(
        "DeepSpeed writes to the scratch disk",
        "flytune/sharding/zero.py",
        ("free_form",),
        instead("flytune.sharding.zero:_is_scratch", returns(True)),
    ),
    Removal("numbers have limits", "flytune/limits.py", ("recipe",), schema(("le", None), ("lt", None))),
    Removal(
        "values that nobody means are refused",
        "flytune/written_files.py",
        ("recipe", "hardware"),
        instead("flytune.written_files:wrong_values", lambda old: lambda *_: iter(())),
    ),
    Removal(
        "equal keys of YAML are refused",
        "flytune/yaml_core.py",
        ("recipe", "hardware"),
        instead(
            "flytune.yaml_core:CoreLoader.compose_mapping_node", weakened.plain_yaml("compose_mapping_node")
        ),
    ),
    Removal(
        "YAML is bounded",
        "flytune/yaml_core.py",
        ("recipe", "hardware"),
        each(
            instead("flytune.yaml_core:CoreLoader.compose_node", weakened.plain_yaml("compose_node")),
            instead("flytune.json_core:is_deep", returns(False)),
        ),
    ),
    Removal(
        "patterns that match nothing are refused",
        "flytune/models/adapter_targets.py",
        ("patterns",),
        instead("flytune.models.adapter_targets:problems", returns([])),
    ),
    Removal(
        "points of a grid are all there",
        "flytune/sweeps/grid.py",
        ("grid",),
        instead("flytune.sweeps.grid:_combinations", then(lambda points: points[:-1] or points)),
    ),
    Removal(
        "patterns of layers are what is adapted",
        "flytune/models/adapter_targets.py",
        ("patterns",),
        instead(
            "flytune.models.adapter_targets:matcher",
            lambda old: lambda *_: lambda name: name.endswith("_proj"),
        ),
    ),
    Removal(
        "accelerators are those of the file",
        "flytune/hardware/accelerators.py",
        ("plan",),
        instead("flytune.hardware.accelerators:accelerator_named", weakened.shipped_accelerator),
    ),
    Removal(
        "unprintable characters are escaped",
        "flytune/errors.py",
        ("recipe", "rows", "command"),
        instead("flytune.errors:printable", lambda old: str),
    ),
    Removal(
        "commands overwrite nothing",
        "flytune/cli/arguments.py",
        ("command",),
        instead("flytune.cli.arguments:_taken", returns(None)),
    ),
    Removal(
        "booleans are not numbers",
        "flytune/schema.py",
        ("recipe", "hardware"),
        recoded("flytune.schema:_refuse_boolean", lambda kind, value: value),
    ),
    Removal(
        "names of rows are different",
        "flytune/written_files.py",
        ("hardware",),
        instead("flytune.written_files:load_rows", weakened.rows_of_any_name),
    ),
    Removal(
        "shapes of volumes are those of shapes.yaml",
        "flytune/hardware/cluster.py",
        ("hardware",),
        instead("flytune.hardware.cluster:Cluster.check_shapes", returns(None)),
    ),
    Removal(
        "patterns that try too many ways are refused",
        "flytune/recipe/patterns.py",
        ("patterns",),
        instead("flytune.recipe.patterns:problem", returns(None)),
    ),
    Removal(
        "points of a grid have a limit",
        "flytune/sweeps/grid.py",
        ("grid",),
        instead("flytune.sweeps.grid:_combinations", weakened.any_number),
    ),
    Removal(
        "pipes, devices and endless files are not read",
        "flytune/files.py",
        ("places", "command"),
        each(
            instead("flytune.files:_problem", returns(None)),
            instead("flytune.files:read_within", weakened.all_of_file),
        ),
    ),
    # Files of other tools.
    Removal(
        "keys without a counterpart are named",
        "flytune/conversion/draft.py",
        ("conversion",),
        instead(
            "flytune.conversion.draft:Draft.leave", lambda old: lambda self, key, reason="": self.take(key)
        ),
    ),
    Removal(
        "keys that change what is learned are refused",
        "flytune/conversion/draft.py",
        ("conversion",),
        instead("flytune.conversion.draft:Draft.refuse_changes", returns(None)),
    ),
    Removal(
        "a batch is that of all GPUs",
        "flytune/conversion/training.py",
        ("conversion",),
        instead(
            "flytune.conversion.training:put_batch",
            lambda old: lambda draft, micro, steps, gpus, words: old(draft, micro, steps, 1, words),
        ),
    ),
    Removal(
        "texts of another tool end no line",
        "flytune/conversion/draft.py",
        ("conversion",),
        instead("flytune.conversion.draft:_in_a_line", lambda old: str),
    ),
    # Credentials.
    Removal(
        "credentials are refused",
        "flytune/addresses.py",
        ("recipe", "hardware"),
        instead("flytune.addresses:problem", returns(None)),
    ),
    Removal(
        "credentials are hidden",
        "flytune/addresses.py",
        ("command", "artifact", "decisions", "webhook"),
        instead("flytune.addresses:redact", lambda old: str),
    ),
    Removal(
        "decisions are shown without credentials",
        "flytune/cli/accepted.py",
        ("decisions",),
        each(
            instead("flytune.cli.accepted:redact", lambda old: str),
            instead("flytune.cli.accepted:_redacted", lambda old: dict),
        ),
    ),
    Removal(
        "messages have no credentials",
        "flytune/artifacts/notify.py",
        ("webhook",),
        instead("flytune.artifacts.notify:without_secrets", lambda old: str),
    ),
    Removal(
        "exchanges have a limit of time",
        "flytune/servers/exchange.py",
        ("webhook", "served"),
        instead("flytune.servers.exchange:answer_to", lambda old: weakened.unlimited),
    ),
    Removal(
        "no redirect is followed",
        "flytune/servers/exchange.py",
        ("served",),
        instead("flytune.servers.exchange:_open", lambda old: weakened.following),
    ),
    Removal(
        "answers of servers have their form",
        "flytune/servers/client.py",
        ("served",),
        instead("flytune.servers.client:Client._read", weakened.of_any_form),
    ),
    Removal(
        "messages have a limit of length",
        "flytune/artifacts/notify.py",
        ("webhook",),
        instead("flytune.artifacts.notify:shortened", lambda old: lambda text, limit: text),
    ),
    Removal(
        "secrets of the environment are hidden",
        "tasks/runtime/secrets.py",
        ("command",),
        instead("flytune.addresses:_SECRET_NAMES", lambda old: __import__("re").compile("(?!)")),
    ),
    # Plans.
    Removal(
        "memory is counted whole",
        "flytune/planning/requirements.py",
        ("plan",),
        instead("flytune.planning.requirements:of", then(weakened.halved)),
    ),
    Removal(
        "a plan fits",
        "flytune/records/plan.py",
        ("plan",),
        instead("flytune.records.plan:Need.share", lambda old: property(lambda self: 0.1)),
    ),
    Removal(
        "what fits is planned",
        "flytune/planning/candidates.py",
        ("plan",),
        instead("flytune.planning.candidates:best_fit", returns("does not fit")),
    ),
    Removal(
        "all parameters are counted",
        "training_estimates/sizes.py",
        ("plan",),
        instead(
            "training_estimates.sizes:Geometry.parameters",
            lambda old: property(lambda self: int(0.9 * old.fget(self))),
        ),
    ),
    Removal(
        "steps are those of all epochs",
        "flytune/data/order.py",
        ("plan",),
        instead("flytune.data.order:steps_of", weakened.whole_steps),
    ),
    Removal(
        "the price is that of all nodes",
        "flytune/hardware/shapes.py",
        ("plan",),
        instead(
            "flytune.hardware.shapes:Shape.total_price_per_hour",
            lambda old: property(lambda self: self.price_per_hour),
        ),
    ),
    # Data.
    Removal(
        "all rows are read",
        "flytune/data/readers.py",
        ("samples",),
        instead("flytune.data.readers:read", weakened.without_last),
    ),
    Removal(
        "all files of a folder are read",
        "flytune/data/sources.py",
        ("samples",),
        instead("flytune.data.sources:locate", then(weakened.fewer_files)),
    ),
    Removal(
        "answers alone are trained",
        "flytune/data/labels.py",
        ("samples",),
        instead("flytune.data.labels:_labelled", then(weakened.all_labelled)),
    ),
    Removal(
        "what a template leaves out is refused",
        "flytune/data/render.py",
        ("template",),
        instead("flytune.data.render:Completeness.check", returns(None)),
    ),
    Removal(
        "control tokens in a text stay text",
        "flytune/data/control_tokens.py",
        ("samples",),
        instead("flytune.data.control_tokens:ControlTokens.are_in", returns(False)),
    ),
    Removal(
        "chat templates end in time",
        "flytune/models/chat_templates.py",
        ("template",),
        instead("flytune.models.chat_templates:SECONDS", lambda old: 10**6),
    ),
    Removal(
        "chat templates make no endless text",
        "flytune/models/chat_templates.py",
        ("template",),
        each(
            instead("flytune.models.chat_templates:LONGEST", lambda old: 10**15),
            instead("flytune.models.chat_templates:MEMORY", lambda old: 10**13),
        ),
    ),
    Removal(
        "bad rows have a limit",
        "flytune/data/bad_rows.py",
        ("samples",),
        instead("flytune.data.bad_rows:BadRows.check", returns(None)),
    ),
    Removal(
        "samples are cut to max_length",
        "flytune/data/rows/base.py",
        ("samples",),
        instead("flytune.data.rows.base:RowKind.cut", lambda old: lambda self, sequences, data: [sequences]),
    ),
    Removal(
        "images are refused",
        "flytune/data/columns.py",
        ("samples",),
        each(
            instead("flytune.data.messages:_refuse_keys", returns(None)),
            instead("flytune.data.columns:refuse_unread", returns(None)),
        ),
    ),
    Removal(
        "rows of megabytes are refused",
        "flytune/data/process.py",
        ("samples",),
        instead("flytune.data.process:_refuse_large", returns(None)),
    ),
    Removal(
        "rows of a table have a limit",
        "flytune/data/readers.py",
        ("rows",),
        instead("flytune.data.readers:LARGEST_LINE", lambda old: 10**15),
    ),
    Removal(
        "equal samples are stored once",
        "flytune/data/preparation.py",
        ("samples",),
        instead(
            "flytune.data.process:digest", lambda old: lambda ids, labelled: __import__("os").urandom(16)
        ),
    ),
    Removal(
        "equal keys of JSON are refused",
        "flytune/json_core.py",
        ("deepspeed", "dataset", "rows"),
        instead("flytune.json_core:_DECODER", weakened.plain_decoder(object_pairs_hook=False)),
    ),
    Removal(
        "numbers of JSON are finite",
        "flytune/json_core.py",
        ("dataset", "rows", "deepspeed"),
        instead(
            "flytune.json_core:_DECODER", weakened.plain_decoder(parse_float=False, parse_constant=False)
        ),
    ),
    Removal(
        "JSON is bounded in depth",
        "flytune/json_core.py",
        ("rows", "dataset"),
        instead("flytune.json_core:is_deep", returns(False)),
    ),
    Removal(
        "prompts are all there",
        "flytune/inference/prompts.py",
        ("prompts",),
        instead("flytune.inference.prompts:read_part", then(lambda rows: rows[1:])),
    ),
    Removal(
        "rows name no image elsewhere",
        "flytune/data/image_rows.py",
        ("images",),
        instead("flytune.data.image_rows:_below", lambda old: lambda name, *_: weakened.any_place(name)),
    ),
    Removal(
        "the pixels of an image are bounded",
        "flytune/models/images.py",
        ("images",),
        instead("flytune.limits:PIXELS", lambda old: 10**12),
    ),
    Removal(
        "a saved data set names no file elsewhere",
        "flytune/data/readers.py",
        ("saved",),
        instead("flytune.data.readers:_check_names_of_saved", returns(None)),
    ),
    Removal(
        "rewards are behind walls and an audit hook",
        "flytune/rewards/worker.py",
        ("reward",),
        instead("flytune.rewards.process:_WORKER", weakened.worker(walls="        pass\n")),
    ),
    Removal(
        "rewards are behind the kernel's walls",
        "flytune/rewards/walls.py",
        ("reward",),
        instead("flytune.rewards.process:_WORKER", weakened.worker(walls=weakened.HOOK_ALONE)),
    ),
    Removal(
        "rewards start no program without an event",
        "flytune/rewards/worker.py",
        ("reward",),
        instead(
            "flytune.rewards.process:_WORKER",
            weakened.worker(walls=weakened.HOOK_ALONE, programs="    sys.addaudithook(hook)"),
        ),
    ),
    Removal(
        "a judged program has no way to the answers",
        "flytune/rewards/worker.py",
        ("reward",),
        instead("flytune.rewards.process:_WORKER", weakened.worker(files="")),
    ),
    Removal(
        "what a test expects stays with the tests",
        "flytune/rewards/calls.py",
        ("reward",),
        instead("flytune.rewards.process:_WORKER", weakened.comparing_stand_ins),
    ),
    Removal(
        "rewards of an artifact run by consent",
        "flytune/artifacts/reproduction.py",
        ("sealed",),
        instead("flytune.recipe.objectives.grpo:Grpo.own_code", lambda old: []),
    ),
    Removal(
        "engines of an artifact's recipe run by consent",
        "flytune/artifacts/reproduction.py",
        ("sealed",),
        instead("flytune.recipe.objectives.grpo:Grpo.own_places", lambda old: []),
    ),
    Removal(
        "images of a saved data set are not opened",
        "flytune/data/readers.py",
        ("saved",),
        instead("flytune.data.readers:leave_encoded", returns(None)),
    ),
    Removal(
        "a tokenizer makes no endless text",
        "flytune/models/tokenizers.py",
        ("tokenizer",),
        instead("flytune.models.tokenizers:_problem", returns(None)),
    ),
    Removal(
        "a tokenizer names no file elsewhere",
        "flytune/models/tokenizers.py",
        ("tokenizer",),
        instead(
            "flytune.models.tokenizers:_object",
            lambda old: lambda file: old(file) if file.stem == "tokenizer" else {},
        ),
    ),
    # Records and artifacts.
    Removal(
        "a manifest lists the samples",
        "flytune/records/dataset.py",
        ("dataset",),
        instead("flytune.data.shards:read_manifest", then(weakened.without_shards)),
    ),
    Removal(
        "unknown fields of records are refused",
        "flytune/schema.py",
        ("dataset",),
        schema(
            ("extra_behavior", "ignore"), ("extra_fields_behavior", "ignore"), of="flytune.records:Manifest"
        ),
    ),
    Removal(
        "names of a list are different",
        "flytune/names.py",
        ("artifact",),
        instead("flytune.names:check_list", lambda old: list),
    ),
    Removal(
        "links stay in their folder",
        "flytune/names.py",
        ("sealed",),
        instead("flytune.names:inside", lambda old: lambda folder, name: folder / name),
    ),
    Removal(
        "links lead out of no artifact",
        "flytune/records/contents.py",
        ("sealed",),
        instead("flytune.records.contents:_link_problem", returns(None)),
    ),
    Removal(
        "what an export alone lists is not copied",
        "flytune/adapters/loading.py",
        ("sealed",),
        instead("flytune.adapters.loading:copy_tokenizer", lambda old: weakened.copy_listed),
    ),
    Removal(
        "an artifact names no base at an address",
        "flytune/artifacts/opening.py",
        ("sealed",),
        instead("flytune.artifacts.opening:_check_base", returns(None)),
    ),
    Removal(
        "weights that are cut off are refused",
        "flytune/models/tensor_headers.py",
        ("config",),
        instead("flytune.models.tensor_headers:_parse", weakened.larger_file),
    ),
    Removal(
        "a note keeps the batch",
        "flytune/training/attempt_notes.py",
        ("attempts",),
        instead("flytune.training.attempt_notes:Notes.applied", weakened.size_alone),
    ),
    Removal(
        "damaged records of attempts are refused",
        "flytune/training/earlier_attempts.py",
        ("attempts",),
        instead("flytune.training.earlier_attempts:stored", weakened.undamaged_alone),
    ),
    Removal(
        "a rollback accepts the model before",
        "flytune/registry/history.py",
        ("decisions",),
        instead("flytune.registry.history:_accepted", weakened.never_rolled_back),
    ),
    Removal(
        "a list has all files",
        "flytune/records/contents.py",
        ("sealed",),
        instead("flytune.records.contents:list_files", returns([])),
    ),
    Removal(
        "names stay in their folder",
        "flytune/names.py",
        ("artifact", "checkpoint"),
        instead("flytune.names:problem", returns(None)),
    ),
    Removal(
        "files are compared before they are used",
        "flytune/records/contents.py",
        ("sealed",),
        instead("flytune.records.contents:_problem", returns(None)),
    ),
    Removal(
        "files that are not listed are refused",
        "flytune/records/contents.py",
        ("sealed",),
        instead("flytune.records.contents:LOADED", lambda old: frozenset()),
    ),
    Removal(
        "an artifact as a base is compared",
        "flytune/models/base.py",
        ("sealed",),
        instead("flytune.models.base:_verify", returns(None)),
    ),
    Removal(
        "fetched files are compared",
        "flytune/artifacts/fetch.py",
        ("artifact",),
        instead("flytune.artifacts.fetch:_fetch", lambda old: weakened.copy_unchecked),
    ),
    Removal(
        "changed records of a list are told",
        "flytune/artifacts/catalog.py",
        ("artifact",),
        instead("flytune.artifacts.catalog:_hashes", returns(({}, ""))),
    ),
    Removal(
        "code runs by consent",
        "flytune/artifacts/opening.py",
        ("sealed",),
        instead("flytune.artifacts.opening:check_code", returns(None)),
    ),
    Removal(
        "an adapter's fields are known",
        "flytune/models/adapter_files.py",
        ("adapter", "sealed"),
        instead("flytune.models.adapter_files:_problem", returns(None)),
    ),
    Removal(
        "an adapter's ranks are its tensors'",
        "flytune/models/adapter_files.py",
        ("sealed",),
        instead("flytune.models.adapter_files:check_ranks", returns(None)),
    ),
    Removal(
        "an adapter is loaded",
        "flytune/models/initial_adapter.py",
        ("adapter",),
        instead("flytune.models.initial_adapter:load_weights", returns(None)),
    ),
    Removal(
        "an adapter is merged as it was trained",
        "flytune/adapters/merging.py",
        ("sealed",),
        instead("flytune.adapters.merging:_layers", then(weakened.doubled)),
    ),
    Removal(
        "sizes of config.json are numbers",
        "training_estimates/config_json.py",
        ("config",),
        instead("training_estimates.config_json:Config.size", weakened.unchecked_size),
    ),
    Removal(
        "config.json is compared with the weights",
        "training_estimates/tensor_counts.py",
        ("config",),
        instead("training_estimates.tensor_counts:compare", returns(None)),
    ),
    Removal(
        "a manifest of a checkpoint has its digest",
        "flytune/training/checkpoints/ledger.py",
        ("checkpoint",),
        instead("flytune.training.checkpoints.ledger:Checkpoint.sealed", lambda old: lambda self: self),
    ),
    Removal(
        "files of a checkpoint are compared",
        "flytune/training/checkpoints/ledger.py",
        ("checkpoint",),
        instead("flytune.training.checkpoints.ledger:Ledger.fault", returns(None)),
    ),
    Removal(
        "pods are restricted",
        "flytune/pods/security.py",
        ("hardware",),
        instead("flytune.pods.security:restrict", lambda old: lambda spec, *_, **__: spec),
    ),
]
