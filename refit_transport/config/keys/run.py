"""Keys of a run: `data.*`, `env.*`, `cluster.*`, `logger.*`, `checkpointing.*`."""

from __future__ import annotations

from refit_transport.config.key import Key, section

DATA = section(
    "data",
    "Data",
    "Prompts. Either a built-in task that makes its own, or a JSONL file.",
    Key("dataset_name", str, "reverse_digits", "Where prompts come from.", choices=("reverse_digits", "jsonl")),
    Key("train_path", str, None, "JSONL file of training prompts."),
    Key("val_path", str, None, "JSONL file of validation prompts."),
    Key("prompt_key", str, "prompt", "Field of the prompt: a string, or a list of chat messages."),
    Key("answer_key", str, "answer", "Field of the expected answer, given to the reward function."),
    Key("max_input_seq_length", int, "${policy.max_total_sequence_length}", "Longer prompts are an error.", minimum=1),
    Key("shuffle", bool, True, "Shuffle training prompts in each epoch."),
    Key("num_digits", int, 3, "`reverse_digits`: digits per prompt.", minimum=1, maximum=8),
)

ENV = section(
    "env",
    "Environment",
    "What an answer earns.",
    Key(
        "reward",
        str,
        "exact_match",
        "`exact_match`, or `module:function`, called with prompt, answer and the data set's row; returns a number.",
    ),
)

CLUSTER = section(
    "cluster",
    "Cluster",
    "What the run may use.",
    Key("gpus_per_node", int, 1, "GPUs per node; on CPU, rank processes per node.", minimum=1),
    Key("num_nodes", int, 1, "Nodes.", minimum=1),
    Key("segment_size", int, None, "Nodes per NVLink domain.", minimum=1),
    Key("setup_timeout_s", float, 600.0, "Placement and the building of all models fail after so long.", above=0),
    Key("step_timeout_s", float, 1800.0, "Any one call of a trainer or an engine fails after so long.", above=0),
    Key("device", str, "auto", "`auto` takes GPUs where there are any.", choices=("auto", "cpu", "cuda")),
)

LOGGER = section(
    "logger",
    "Logging",
    "Where a run writes.",
    Key("log_dir", str, "results", "A run's folder is made in here."),
    Key("run_name", str, None, "Name of the run's folder; null makes one from the recipe and the time."),
    Key("tensorboard_enabled", bool, True, "Write TensorBoard events."),
    Key("progress", bool, True, "Show step, reward and refit time while running."),
    Key("plots", bool, True, "Draw plots at the end."),
    Key("num_val_samples_to_print", int, 0, "Validation answers shown.", minimum=0),
)

CHECKPOINTING = section(
    "checkpointing",
    "Checkpoints",
    "Model, optimizer, step, weight version and the place in the data.",
    Key("enabled", bool, True, "Save checkpoints."),
    Key("checkpoint_dir", str, None, "Folder of checkpoints; null is `checkpoints` in the run's folder."),
    Key("resume_from", str, None, "Checkpoint, or folder whose newest checkpoint, to go on from."),
    Key("metric_name", str, "val:accuracy", "Metric that ranks checkpoints; null keeps the newest.", optional=True),
    Key("higher_is_better", bool, True, "Whether a larger metric is better."),
    Key("keep_top_k", int, 3, "Checkpoints kept; null keeps all.", minimum=1, optional=True),
    Key("save_period", int, 10, "Save each so many steps.", minimum=1),
    Key(
        "checkpoint_must_save_by", str, None, "`DD:HH:MM:SS` after the start: save once more before a job's time is up."
    ),
)
