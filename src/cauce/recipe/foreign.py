"""What other trainers call our settings: one literal table, read by names.py for errors and by document.py
for docs.

Checked against TRL 1.16, verl 0.9, OpenRLHF 0.11 and tinker-cookbook 0.6. `ours` is empty where Cauce has no
such setting; the note then says why or what takes its place. No name here is an alias: each is an error that
points on.
"""

from typing import NamedTuple


class Foreign(NamedTuple):
    """One setting of another trainer. `names`: as it is written today, then older or shorter spellings."""

    names: tuple[str, ...]
    ours: tuple[str, ...]
    note: str = ""


def _row(names: str, ours: str = "", note: str = "") -> Foreign:
    return Foreign(tuple(names.split()), tuple(ours.split()), note)


TRL = (
    _row("model_name_or_path", "model.path"),
    _row(
        "dataset_name dataset_config dataset_train_split",
        "data.train",
        "rows with TRL's columns are read unchanged",
    ),
    _row("dataset_test_split", "data.test"),
    _row("reward_funcs", "reward.fn", "file.py:name or package.module:name; TRL's signature is ours"),
    _row("reward_weights", "reward.weights"),
    _row("num_generations", "rollout.group_size", "completions per prompt; default 8 in both"),
    _row("max_completion_length", "rollout.max_tokens", "default 512 there, 256 here"),
    _row(
        "max_prompt_length",
        "data.max_prompt_tokens",
        "only in older versions; longer prompts are dropped and counted here",
    ),
    _row(
        "per_device_train_batch_size train_batch_size",
        "learner.tasks_per_plan",
        "TRL counts completions, ours counts prompts: tasks_per_plan = per_device_train_batch_size x devices "
        "x "
        "gradient_accumulation_steps / num_generations; for memory see learner.token_budget",
    ),
    _row("gradient_accumulation_steps", "learner.token_budget", "micro-batches are cut by tokens, not counted"),
    _row(
        "steps_per_generation generation_batch_size",
        "learner.mini_batches",
        "optimizer steps that one set of samples is divided into",
    ),
    _row("num_iterations", "learner.epochs", "passes over the same samples; default 1 in both"),
    _row(
        "num_train_epochs max_steps",
        "run.plans",
        "plans = epochs x rows / learner.tasks_per_plan; TRL's max_steps counts optimizer steps",
    ),
    _row("learning_rate", "learner.lr", "default 1e-6 in both"),
    _row("lr_scheduler_type", "learner.schedule", "default linear there, constant here"),
    _row("warmup_steps warmup_ratio", "learner.warmup_steps", "a number of optimizer steps, not a share"),
    _row("weight_decay", "learner.weight_decay"),
    _row("adam_beta1", "learner.beta1"),
    _row("adam_beta2", "learner.beta2"),
    _row("adam_epsilon", "learner.eps"),
    _row("max_grad_norm", "learner.max_grad_norm"),
    _row("bf16 fp16 torch_dtype", "learner.dtype engine.dtype", "auto, fp32 or bf16"),
    _row("beta", "algorithm.kl_coef", "default 0 in both"),
    _row(
        "epsilon",
        "algorithm.clip_low algorithm.clip_high",
        "in TRL one number sets both sides unless epsilon_high",
    ),
    _row("epsilon_high", "algorithm.clip_high"),
    _row("delta", "algorithm.dual_clip"),
    _row(
        "loss_type",
        "algorithm.name algorithm.aggregation",
        "TRL's default dapo is its aggregation only: token_mean; its grpo is sequence_mean_token_mean, its "
        "dr_grpo "
        "token_sum_constant",
    ),
    _row(
        "scale_rewards",
        "algorithm.advantage_scale",
        'group is group_std, false or "none" is none; batch is not there',
    ),
    _row("mask_truncated_completions", "algorithm.mask_truncated"),
    _row("vllm_importance_sampling_correction", "algorithm.correction", "per token and truncated here"),
    _row(
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "algorithm.correction_cap",
        "default 3 there, 2 here",
    ),
    _row("temperature", "rollout.temperature"),
    _row("shuffle_dataset", "data.shuffle"),
    _row("seed data_seed", "run.seed"),
    _row("use_vllm vllm_mode", "engine.backend", "native or vllm; see docs/vllm.md"),
    _row("eval_steps eval_strategy", "eval.every", "counts plans"),
    _row("save_steps save_strategy", "checkpoint.every", "counts plans; 0 saves by checkpoint.max_redo_s"),
    _row("save_total_limit", "checkpoint.keep"),
    _row("output_dir", "run.dir run.name"),
    _row("run_name", "run.name"),
    _row("report_to", "logging.tensorboard", "metrics.jsonl is always written"),
    _row("logging_steps", note="every plan is logged"),
    _row("gradient_checkpointing", "learner.token_budget", "groups over it are made again where that is less work"),
    _row("entropy_coef", note="no entropy bonus in this version; policy/entropy is logged"),
    _row("importance_sampling_level", note="ratios are per token in this version"),
)

VERL = (
    _row("actor_rollout_ref.model.path", "model.path"),
    _row("data.train_files", "data.train", "parquet files for verl are read unchanged"),
    _row("data.val_files", "data.test"),
    _row("data.prompt_key", "data.prompt_key"),
    _row(
        "data.train_batch_size",
        "learner.tasks_per_plan",
        "train_batch_size counts prompts in verl, as tasks_per_plan does; in TRL and OpenRLHF it counts completions",
    ),
    _row("data.max_prompt_length", "data.max_prompt_tokens", "longer prompts are dropped and counted here"),
    _row(
        "data.filter_overlong_prompts data.truncation",
        "data.max_prompt_tokens",
        "longer prompts are always dropped",
    ),
    _row("data.max_response_length", "rollout.max_tokens"),
    _row("data.shuffle", "data.shuffle"),
    _row("data.seed", "run.seed"),
    _row("actor_rollout_ref.rollout.n", "rollout.group_size", "completions per prompt; default 1 there, 8 here"),
    _row("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    _row(
        "actor_rollout_ref.rollout.name",
        "engine.backend",
        "native or vllm; see docs/vllm.md",
    ),
    _row("actor_rollout_ref.rollout.dtype", "engine.dtype", "auto, fp32 or bf16"),
    _row("actor_rollout_ref.rollout.max_num_seqs", "engine.slots"),
    _row(
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "learner.mini_batches",
        "mini_batches is their number: train_batch_size / ppo_mini_batch_size",
    ),
    _row(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
        "actor_rollout_ref.actor.ppo_micro_batch_size actor_rollout_ref.actor.use_dynamic_bsz",
        "learner.token_budget",
        "micro-batches are always cut by tokens",
    ),
    _row("actor_rollout_ref.actor.ppo_epochs", "learner.epochs"),
    _row("actor_rollout_ref.actor.optim.lr", "learner.lr", "default 1e-6 in both"),
    _row("actor_rollout_ref.actor.optim.lr_scheduler_type warmup_style", "learner.schedule"),
    _row(
        "actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
        "learner.warmup_steps",
        "a number of optimizer steps, not a share",
    ),
    _row("actor_rollout_ref.actor.optim.weight_decay", "learner.weight_decay", "default 0.01 there, 0 here"),
    _row("actor_rollout_ref.actor.optim.betas", "learner.beta1 learner.beta2"),
    _row("actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.optim.clip_grad", "learner.max_grad_norm"),
    _row("actor_rollout_ref.actor.clip_ratio", "algorithm.clip_low algorithm.clip_high"),
    _row("actor_rollout_ref.actor.clip_ratio_low", "algorithm.clip_low"),
    _row("actor_rollout_ref.actor.clip_ratio_high", "algorithm.clip_high"),
    _row("actor_rollout_ref.actor.clip_ratio_c", "algorithm.dual_clip", "default 3 there, off here"),
    _row(
        "actor_rollout_ref.actor.loss_agg_mode",
        "algorithm.aggregation",
        "token-mean is token_mean, seq-mean-token-mean is sequence_mean_token_mean, seq-mean-token-sum is "
        "sequence_mean_token_sum, seq-mean-token-sum-norm is token_sum_constant",
    ),
    _row("actor_rollout_ref.actor.loss_scale_factor", "algorithm.aggregation_length"),
    _row("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl_in", "loss, with algorithm.kl_coef above 0"),
    _row(
        "actor_rollout_ref.actor.kl_loss_coef",
        "algorithm.kl_coef",
        "with algorithm.kl_in=loss; 0 turns it off",
    ),
    _row(
        "actor_rollout_ref.actor.kl_loss_type algorithm.kl_penalty",
        "algorithm.kl_estimator",
        "kl is k1, mse is k2, low_var_kl is k3",
    ),
    _row(
        "actor_rollout_ref.actor.entropy_coeff",
        note="no entropy bonus in this version; policy/entropy is logged",
    ),
    _row(
        "algorithm.adv_estimator",
        "algorithm.name",
        "grpo or rloo; others, such as gae, are not in this version",
    ),
    _row("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage_scale", "true is group_std, false is none"),
    _row("algorithm.use_kl_in_reward", "algorithm.kl_in", "reward, with algorithm.kl_coef above 0"),
    _row("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", "with algorithm.kl_in=reward"),
    _row("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
    _row("algorithm.rollout_correction.rollout_is", "algorithm.correction", "token level"),
    _row("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction_cap", "default 2 in both"),
    _row(
        "reward.custom_reward_function.path custom_reward_function.path custom_reward_function.name",
        "reward.fn",
        "path and name in one: file.py:compute_score",
    ),
    _row("custom_reward_function.reward_kwargs", "reward.kwargs"),
    _row("reward.num_workers", "reward.workers"),
    _row("trainer.total_epochs", "run.plans", "plans = epochs x rows / learner.tasks_per_plan"),
    _row("trainer.total_training_steps", "run.plans", "a verl step is a plan"),
    _row(
        "trainer.nnodes trainer.n_gpus_per_node",
        "rollout.actors rollout.gpus learner.gpus",
        "what each role takes is said per role; the cluster's size is Ray's business",
    ),
    _row("trainer.save_freq", "checkpoint.every", "counts plans; 0 saves by checkpoint.max_redo_s"),
    _row("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    _row("trainer.test_freq", "eval.every", "counts plans"),
    _row("trainer.val_before_train", "eval.at_start"),
    _row("trainer.default_local_dir", "run.dir"),
    _row("trainer.project_name", "run.dir"),
    _row("trainer.experiment_name", "run.name"),
    _row("trainer.logger", "logging.tensorboard", "metrics.jsonl is always written"),
    _row("trainer.resume_mode", note="`cauce resume RUN` goes on with a run"),
    _row("trainer.v1.separate_async.parameter_sync_step", "weights.every"),
    _row("trainer.v1.sampler.max_off_policy_threshold", "buffer.max_staleness"),
    _row(
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "learner.token_budget",
        "groups over it are made again where that is less work",
    ),
)

OPENRLHF = (
    _row("actor.model_name_or_path pretrain", "model.path"),
    _row("data.prompt_dataset prompt_data", "data.train"),
    _row("eval.dataset eval_dataset", "data.test"),
    _row("data.input_key input_key", "data.prompt_key"),
    _row("data.label_key label_key", "data.gold_key"),
    _row("data.apply_chat_template apply_chat_template", "data.chat_template", "on by default here"),
    _row("data.input_template input_template", note="a template with {} is not read; put it into the rows"),
    _row("reward.remote_url remote_rm_url", "reward.fn", "file.py:reward_func"),
    _row("rollout.n_samples_per_prompt", "rollout.group_size", "default 1 there, 8 here"),
    _row("rollout.batch_size rollout_batch_size", "learner.tasks_per_plan", "both count prompts"),
    _row(
        "train.batch_size train_batch_size",
        "learner.mini_batches",
        "OpenRLHF counts completions per optimizer step; mini_batches = rollout.batch_size x "
        "n_samples_per_prompt / "
        "train.batch_size",
    ),
    _row(
        "train.micro_batch_size micro_train_batch_size train.max_tokens_per_gpu",
        "learner.token_budget",
        "micro-batches are always cut by tokens",
    ),
    _row("rollout.max_new_tokens generate_max_len", "rollout.max_tokens"),
    _row("data.max_len prompt_max_len", "data.max_prompt_tokens", "data.max_len there holds the answer as well"),
    _row("rollout.temperature", "rollout.temperature"),
    _row("train.max_epochs max_epochs", "learner.epochs", "passes over one set of samples"),
    _row("train.num_episodes num_episodes", "run.plans", "plans = episodes x rows / learner.tasks_per_plan"),
    _row("actor.adam.lr actor_learning_rate", "learner.lr", "default 1e-6 in both"),
    _row("actor.adam.betas adam_betas", "learner.beta1 learner.beta2", "default 0.9 0.95 there, 0.9 0.999 here"),
    _row("actor.adam.eps", "learner.eps"),
    _row("actor.adam.weight_decay l2", "learner.weight_decay"),
    _row(
        "actor.lr_scheduler lr_scheduler",
        "learner.schedule",
        "default cosine with a floor there, constant here",
    ),
    _row(
        "actor.lr_warmup_ratio lr_warmup_ratio",
        "learner.warmup_steps",
        "a number of optimizer steps, not a share",
    ),
    _row("actor.max_norm max_norm", "learner.max_grad_norm"),
    _row("actor.eps_clip eps_clip", "algorithm.clip_low algorithm.clip_high"),
    _row("actor.eps_clip_low_high eps_clip_low_high", "algorithm.clip_low algorithm.clip_high"),
    _row("actor.dual_clip", "algorithm.dual_clip"),
    _row("actor.loss_agg_mode", "algorithm.aggregation"),
    _row(
        "algo.advantage.estimator advantage_estimator",
        "algorithm.name",
        "group_norm is grpo; dr_grpo and rloo have their names",
    ),
    _row("algo.advantage.no_std_norm", "algorithm.advantage_scale", "none"),
    _row("algo.kl.init_coef init_kl_coef", "algorithm.kl_coef", "default 0.01 there, 0 here"),
    _row("algo.kl.estimator kl_estimator", "algorithm.kl_estimator", "default k1 there, k3 here"),
    _row("algo.kl.use_loss use_kl_loss", "algorithm.kl_in"),
    _row("algo.dynamic_filtering_enable dynamic_filtering", "algorithm.dynamic_sampling"),
    _row("algo.advantage.is_correction_level enable_vllm_is_correction", "algorithm.correction"),
    _row("train.async_enable train.async_queue_size async_train", "buffer.max_staleness", "above 0 overlaps"),
    _row(
        "vllm.num_engines vllm_num_engines",
        "rollout.actors",
        "with engine.backend=vllm each actor has an engine of its own",
    ),
    _row("actor.num_gpus_per_node actor_num_gpus_per_node", "learner.gpus"),
    _row("train.seed", "run.seed"),
    _row("train.full_determinism_enable", "engine.deterministic"),
    _row("eval.steps eval_steps", "eval.every", "counts plans"),
    _row("ckpt.save_steps save_steps", "checkpoint.every", "counts plans; 0 saves by checkpoint.max_redo_s"),
    _row("ckpt.max_num max_ckpt_num", "checkpoint.keep"),
    _row("ckpt.output_dir ckpt.path save_path ckpt_path", "run.dir"),
    _row("logger.tensorboard_dir use_tensorboard", "logging.tensorboard"),
    _row("logger.wandb.run_name wandb_run_name", "run.name"),
)

COOKBOOK = (
    _row("model_name", "model.path"),
    _row("groups_per_batch", "learner.tasks_per_plan", "both count prompts"),
    _row("group_size", "rollout.group_size", "default 4 there, 8 here"),
    _row("max_tokens", "rollout.max_tokens"),
    _row("temperature", "rollout.temperature"),
    _row("learning_rate", "learner.lr", "rates for LoRA are higher; all weights are trained here"),
    _row("num_substeps", "learner.mini_batches", "optimizer steps per batch"),
    _row("kl_penalty_coef", "algorithm.kl_coef", "with algorithm.kl_in=reward and algorithm.kl_estimator=k1"),
    _row("loss_fn", "algorithm.name"),
    _row("remove_constant_reward_groups", "algorithm.dynamic_sampling", "dropped there, replaced here"),
    _row("max_steps_off_policy", "buffer.max_staleness", "a hard bound here"),
    _row("max_steps", "run.plans"),
    _row("eval_every", "eval.every"),
    _row("save_every", "checkpoint.every", "0 saves by checkpoint.max_redo_s here, never there"),
    _row("log_path", "run.dir run.name"),
    _row("wandb_name", "run.name"),
    _row("env", "data.train reward.fn", "rows and a reward function"),
    _row("lora_rank", note="all weights are trained in this version"),
    _row("renderer_name", "data.chat_template", "the tokenizer's own template is used"),
)

FOREIGN: dict[str, tuple[Foreign, ...]] = {
    "TRL": TRL,
    "verl": VERL,
    "OpenRLHF": OPENRLHF,
    "tinker-cookbook": COOKBOOK,
}
