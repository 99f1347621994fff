"""How other toolkits call what a key here sets: for the hint on an unknown key, and for a table of docs/training.md.

python scripts/foreign_names.py --write      bring that table up to date
"""

from collections.abc import Iterator
from dataclasses import dataclass

TOOLKITS = {
    "fairseq": "fairseq",
    "marian": "Marian",
    "sockeye": "Sockeye",
    "joeynmt": "JoeyNMT",
    "opennmt": "OpenNMT-py, Eole",
    "hugging_face": "Hugging Face",
}


@dataclass(frozen=True)
class Foreign:
    """What the toolkits call one thing: names as they are typed there, with spaces between.

    `keys` are those that a command may have for it, the best first. A foreign name is answered with the first that the
    command has, or with `here`, a sentence, where the two are not the same. `also` are names of no toolkit in
    particular, or such as stand under a group: they are not in the table.
    """

    keys: str
    here: str = ""
    fairseq: str = ""
    marian: str = ""
    sockeye: str = ""
    joeynmt: str = ""
    opennmt: str = ""
    hugging_face: str = ""
    also: str = ""

    def names(self) -> Iterator[str]:
        """Every name, as `normal` has it."""
        for toolkit in (*TOOLKITS, "also"):
            yield from map(normal, getattr(self, toolkit).split())


def normal(name: str) -> str:
    """A name without what the toolkits write differently: `--max-tokens` -> `max_tokens`."""
    return name.lstrip("-").replace("-", "_").lower()


FOREIGN = (
    # ---- data and tokenizer
    Foreign(
        "data.train.src",
        "text as it is goes to `data.train.src` and `data.train.tgt`: nothing is binarised",
        fairseq="--trainpref",
        marian="--train-sets",
        sockeye="--prepared-data",
        joeynmt="data.train",
        opennmt="path_src path_tgt",
        hugging_face="train_file",
        also="train_path train_data",
    ),
    Foreign(
        "data.dev.src",
        "it is `data.dev.src` and `data.dev.tgt`",
        fairseq="--validpref",
        marian="--valid-sets",
        sockeye="--validation-source --validation-target",
        joeynmt="data.dev",
        opennmt="valid.path_src valid.path_tgt",
        hugging_face="validation_file",
        also="dev.path_src dev.path_tgt valid_file dev_file valid_data dev_data",
    ),
    Foreign(
        "data.test.NAME.src",
        "each test set has a name: `data.test.NAME.src`, `data.test.NAME.tgt`",
        fairseq="--testpref",
        joeynmt="data.test",
        hugging_face="test_file",
        also="test_data",
    ),
    Foreign(
        "data.src_lang",
        fairseq="--source-lang",
        joeynmt="src.lang",
        hugging_face="source_lang",
        also="source_language src_language",
    ),
    Foreign(
        "data.tgt_lang",
        fairseq="--target-lang",
        joeynmt="trg.lang",
        hugging_face="target_lang",
        also="target_language tgt_language trg_lang",
    ),
    Foreign("data.train.tgt", sockeye="--target", also="trg"),
    Foreign("data.train.src", sockeye="--source"),
    Foreign("data.store_dir", fairseq="--destdir", opennmt="save_data", also="data_bin cache_dir"),
    Foreign(
        "data.filter.max_length",
        marian="--max-length",
        sockeye="--max-seq-len",
        joeynmt="max_length",
        opennmt="src_seq_length tgt_seq_length",
        hugging_face="max_source_length max_target_length",
        also="max_sent_length data.max_len",
    ),
    Foreign(
        "tokenizer.vocab_size",
        fairseq="--nwordssrc",
        marian="--dim-vocabs",
        sockeye="--num-words",
        joeynmt="voc_limit",
        opennmt="src_vocab_size",
        hugging_face="vocab_size",
        also="vocabulary_size n_vocab num_merges bpe_merges",
    ),
    Foreign(
        "tokenizer.target.vocab_size",
        "one vocabulary serves both languages, unless `tokenizer.target.vocab_size` gives the target its own",
        fairseq="--nwordstgt --joined-dictionary",
        sockeye="--shared-vocab",
        opennmt="tgt_vocab_size share_vocab",
        hugging_face="decoder_vocab_size",
        also="separate_vocabs",
    ),
    Foreign(
        "tokenizer.model",
        "`tokenizer.model` takes a SentencePiece model that you have, and `tokenizer.target.model` one for the target",
        fairseq="--srcdict --tgtdict",
        marian="--vocabs",
        sockeye="--source-vocab --target-vocab",
        joeynmt="voc_file model_file",
        opennmt="src_vocab tgt_vocab src_subword_model tgt_subword_model",
        hugging_face="tokenizer_name",
        also="sentencepiece_model spm_model tokenizer.path",
    ),
    Foreign("tokenizer.algorithm", also="tokenizer.type tokenizer_type"),
    Foreign(
        "train.subword_sampling",
        marian="--sentencepiece-alphas",
        opennmt="src_subword_alpha tgt_subword_alpha",
        also="bpe_dropout subword_regularization",
    ),
    # ---- model
    Foreign(
        "experiment",
        "a model with its recipe has a name: `experiment=base`, `big`, `small`",
        fairseq="--arch",
        marian="--task",
        also="preset architecture",
    ),
    Foreign(
        "model.n_layers",
        fairseq="--encoder-layers",
        marian="--enc-depth",
        sockeye="--num-layers",
        joeynmt="encoder.num_layers",
        opennmt="layers enc_layers",
        hugging_face="encoder_layers",
        also="num_layers num_encoder_layers n_encoder_layers num_hidden_layers n_layer depth",
    ),
    Foreign(
        "model.n_decoder_layers",
        fairseq="--decoder-layers",
        marian="--dec-depth",
        joeynmt="decoder.num_layers",
        opennmt="dec_layers",
        hugging_face="decoder_layers",
        also="decoder.layers num_decoder_layers",
    ),
    Foreign(
        "model.d_model",
        fairseq="--encoder-embed-dim --decoder-embed-dim",
        marian="--dim-emb",
        sockeye="--transformer-model-size --num-embed",
        joeynmt="hidden_size embedding_dim",
        opennmt="hidden_size word_vec_size",
        hugging_face="d_model",
        also="rnn_size embed_dim emb_dim dim model_dim hidden_dim n_embd",
    ),
    Foreign(
        "model.d_ff",
        fairseq="--encoder-ffn-embed-dim --decoder-ffn-embed-dim",
        marian="--transformer-dim-ffn",
        sockeye="--transformer-feed-forward-num-hidden",
        joeynmt="ff_size",
        opennmt="transformer_ff",
        hugging_face="encoder_ffn_dim decoder_ffn_dim",
        also="ffn_dim ff_dim dim_ff dim_feedforward ffn_size d_inner intermediate_size",
    ),
    Foreign(
        "model.n_heads",
        fairseq="--encoder-attention-heads --decoder-attention-heads",
        marian="--transformer-heads",
        sockeye="--transformer-attention-heads",
        joeynmt="num_heads",
        opennmt="heads",
        hugging_face="encoder_attention_heads decoder_attention_heads",
        also="num_attention_heads attention_heads nhead",
    ),
    Foreign(
        "model.dropout",
        fairseq="--dropout",
        marian="--transformer-dropout",
        sockeye="--transformer-dropout-prepost --embed-dropout",
        joeynmt="dropout",
        opennmt="dropout",
        hugging_face="dropout",
    ),
    Foreign(
        "model.attention_dropout",
        fairseq="--attention-dropout",
        marian="--transformer-dropout-attention",
        sockeye="--transformer-dropout-attention",
        opennmt="attention_dropout",
        hugging_face="attention_dropout",
        also="attn_dropout",
    ),
    Foreign(
        "model.relu_dropout",
        fairseq="--activation-dropout --relu-dropout",
        marian="--transformer-dropout-ffn",
        sockeye="--transformer-dropout-act",
        hugging_face="activation_dropout",
        also="ffn_dropout",
    ),
    Foreign(
        "model.activation",
        fairseq="--activation-fn",
        marian="--transformer-ffn-activation",
        sockeye="--transformer-activation-type",
        joeynmt="activation",
        opennmt="pos_ffn_activation_fn mlp_activation_fn",
        hugging_face="activation_function",
        also="hidden_act",
    ),
    Foreign(
        "model.norm",
        "`model.norm=pre` normalises before a sub-layer, `post` after it as the paper does",
        fairseq="--encoder-normalize-before --decoder-normalize-before",
        marian="--transformer-preprocess --transformer-postprocess --transformer-postprocess-top",
        sockeye="--transformer-preprocess --transformer-postprocess",
        joeynmt="layer_norm",
        hugging_face="normalize_before",
        also="norm_first pre_norm prenorm",
    ),
    Foreign(
        "model.positions",
        "`model.positions` is `sinusoidal` or `learned`",
        fairseq="--encoder-learned-pos --decoder-learned-pos",
        marian="--transformer-train-position-embeddings",
        sockeye="--transformer-positional-embedding-type",
        opennmt="position_encoding",
        hugging_face="static_position_embeddings",
    ),
    Foreign(
        "model.max_positions",
        fairseq="--max-source-positions --max-target-positions",
        hugging_face="max_position_embeddings",
        also="n_positions max_sequence_length",
    ),
    Foreign(
        "model.tie_embeddings",
        "one matrix serves both embeddings and the output, unless `model.tie_embeddings=false`",
        fairseq="--share-all-embeddings --share-decoder-input-output-embed",
        marian="--tied-embeddings-all --tied-embeddings",
        sockeye="--weight-tying-type",
        joeynmt="tied_embeddings tied_softmax",
        opennmt="share_embeddings share_decoder_embeddings",
        hugging_face="tie_word_embeddings",
    ),
    # ---- how much, and how long
    Foreign(
        "train.max_tokens",
        "a micro-batch has `train.max_tokens` at most, padding counted; `train.fit_memory=true` finds what fits",
        fairseq="--max-tokens",
        marian="--mini-batch-fit --workspace",
        hugging_face="per_device_train_batch_size auto_find_batch_size",
        also="micro_batch_size device_batch_size",
    ),
    Foreign(
        "train.tokens_per_step",
        "an update has `train.tokens_per_step` real tokens, over all devices and micro-batches",
        fairseq="--batch-size --update-freq",
        marian="--mini-batch --mini-batch-words --optimizer-delay",
        sockeye="--batch-size --batch-type --update-interval",
        joeynmt="batch_size batch_multiplier",
        opennmt="batch_size accum_count",
        hugging_face="gradient_accumulation_steps",
        also="max_sentences train_batch_size global_batch_size total_batch_size grad_accum accum_steps "
        "accumulate_grad_batches batch_type batch train.batch_tokens",
    ),
    Foreign(
        "train.max_steps",
        fairseq="--max-update",
        marian="--after --after-batches",
        sockeye="--max-updates",
        joeynmt="updates",
        opennmt="train_steps",
        hugging_face="max_steps",
        also="steps num_steps n_steps total_steps num_train_steps max_updates num_updates iterations max_iters",
    ),
    Foreign(
        "train.max_steps",
        "epochs are no limit: set `train.max_steps`",
        fairseq="--max-epoch",
        marian="--after-epochs",
        sockeye="--max-num-epochs",
        joeynmt="epochs",
        hugging_face="num_train_epochs",
        also="epoch max_epochs n_epochs num_epochs",
    ),
    Foreign(
        "train.patience",
        fairseq="--patience",
        marian="--early-stopping",
        sockeye="--max-num-checkpoint-not-improved",
        opennmt="early_stopping",
        hugging_face="early_stopping_patience",
        also="early_stop",
    ),
    # ---- recipe
    Foreign(
        "train.learning_rate",
        fairseq="--lr",
        marian="--learn-rate",
        joeynmt="learning_rate",
        opennmt="learning_rate",
        hugging_face="learning_rate",
        also="max_lr peak_lr base_lr",
    ),
    Foreign(
        "train.learning_rate",
        "`train.learning_rate` is the peak: of inv-sqrt-decay, its rate over the square root of its warm-up",
        sockeye="--initial-learning-rate",
    ),
    Foreign("train.learning_rate_scale", joeynmt="learning_rate_factor", also="learning_rate_constant"),
    Foreign(
        "train.warmup_steps",
        fairseq="--warmup-updates",
        marian="--lr-warmup",
        sockeye="--learning-rate-warmup",
        joeynmt="learning_rate_warmup",
        opennmt="warmup_steps",
        hugging_face="warmup_steps",
        also="num_warmup_steps warmup_iters",
    ),
    Foreign(
        "train.warmup_steps",
        "the warm-up is a number of updates: `train.warmup_steps`",
        hugging_face="warmup_ratio",
        also="warmup_epochs",
    ),
    Foreign(
        "train.decay",
        fairseq="--lr-scheduler",
        marian="--lr-decay-inv-sqrt --lr-decay",
        sockeye="--learning-rate-scheduler-type",
        joeynmt="scheduling",
        opennmt="decay_method",
        hugging_face="lr_scheduler_type",
        also="scheduler schedule lr_schedule learning_rate_decay",
    ),
    Foreign(
        "train.decay",
        "the rate falls by `train.decay`, to 0 under linear and cosine",
        fairseq="--min-lr --stop-min-lr",
        joeynmt="learning_rate_min",
        also="lr_min eta_min min_learning_rate",
    ),
    Foreign(
        "train.optimizer",
        fairseq="--optimizer",
        marian="--optimizer",
        sockeye="--optimizer",
        joeynmt="optimizer",
        opennmt="optim",
        hugging_face="optim",
        also="optimiser optimizer_type",
    ),
    Foreign(
        "train.adam_beta1",
        "Adam's are `train.adam_beta1` and `train.adam_beta2`",
        fairseq="--adam-betas",
        marian="--optimizer-params",
        sockeye="--optimizer-betas --optimizer-params",
        joeynmt="adam_betas",
        also="betas",
    ),
    Foreign(
        "train.adam_eps",
        fairseq="--adam-eps",
        sockeye="--optimizer-eps",
        hugging_face="adam_epsilon",
        also="eps epsilon",
    ),
    Foreign(
        "train.weight_decay",
        fairseq="--weight-decay",
        sockeye="--weight-decay",
        joeynmt="weight_decay",
        hugging_face="weight_decay",
    ),
    Foreign(
        "train.clip_norm",
        fairseq="--clip-norm",
        marian="--clip-norm",
        sockeye="--gradient-clipping-threshold --gradient-clipping-type",
        joeynmt="clip_grad_norm",
        opennmt="max_grad_norm",
        hugging_face="max_grad_norm",
        also="clip grad_clip gradient_clip gradient_clip_val clip_grad max_norm",
    ),
    Foreign(
        "train.label_smoothing",
        fairseq="--label-smoothing",
        marian="--label-smoothing",
        sockeye="--label-smoothing",
        joeynmt="label_smoothing",
        opennmt="label_smoothing",
        hugging_face="label_smoothing_factor",
    ),
    Foreign(
        "train.label_smoothing",
        "the loss is cross-entropy with `train.label_smoothing`, a mean over the tokens of an update",
        fairseq="--criterion",
        marian="--cost-type",
        sockeye="--loss",
        joeynmt="training.loss training.normalization",
        also="loss train.loss train.normalization loss_fn",
    ),
    Foreign(
        "train.average",
        fairseq="scripts/average_checkpoints.py",
        sockeye="sockeye-average",
        joeynmt="scripts/average_checkpoints.py",
        also="average_checkpoints",
    ),
    Foreign(
        "train.ema_decay", fairseq="--ema-decay", marian="--exponential-smoothing", opennmt="average_decay", also="ema"
    ),
    # ---- the machine
    Foreign(
        "train.precision precision",
        "it is `KEY=bf16` or `fp16`, and by default bf16 where the hardware multiplies it",
        fairseq="--fp16 --bf16",
        marian="--fp16 --precision",
        sockeye="--amp --dtype",
        joeynmt="fp16",
        opennmt="model_dtype compute_dtype",
        hugging_face="fp16 bf16",
        also="memory_efficient_fp16 dtype amp mixed_precision half",
    ),
    Foreign(
        "train.device",
        "several GPUs are for `torchrun --nproc-per-node N -m transformer train`",
        fairseq="--distributed-world-size",
        marian="--devices --num-devices",
        sockeye="--dist",
        opennmt="world_size gpu_ranks",
        also="gpus n_gpu n_gpus num_gpus gpu_ids nproc_per_node",
    ),
    Foreign(
        "train.device device",
        "it is `KEY=cpu` or `cuda`",
        fairseq="--cpu",
        sockeye="--use-cpu",
        joeynmt="use_cuda",
        hugging_face="use_cpu no_cuda",
        also="cuda cpu gpu accelerator devices gpus",
    ),
    Foreign("train.threads threads", marian="--cpu-threads", also="num_threads n_threads num_cpus"),
    Foreign(
        "train.prefetch",
        "one thread loads, `train.prefetch` steps ahead",
        fairseq="--num-workers",
        joeynmt="num_workers",
        opennmt="num_workers",
        hugging_face="dataloader_num_workers",
        also="workers",
    ),
    Foreign("train.kernels", also="attention_kernel fused_loss"),  # as earlier commits had them
    Foreign("train.compile", hugging_face="torch_compile"),
    # ---- what a run leaves
    Foreign(
        "checkpoint",
        "a trained model is `run_dir=DIR`, and `checkpoint` one of those in it",
        fairseq="--path",
        marian="--models",
        sockeye="--models",
        opennmt="model",
        also="model_path model_name_or_path checkpoint_path ckpt",
    ),
    Foreign(
        "run_dir",
        fairseq="--save-dir",
        marian="--model",
        joeynmt="model_dir",
        opennmt="save_model",
        hugging_face="output_dir",
        also="name run_name exp_name exp_dir out_dir outdir work_dir checkpoint_dir ckpt_dir log_dir logging_dir "
        "tensorboard_logdir tensorboard_log_dir",
    ),
    Foreign(
        "train.max_steps",
        "the same command goes on with the run in its `run_dir`",
        fairseq="--restore-file",
        hugging_face="resume_from_checkpoint",
        also="resume resume_from",
    ),
    Foreign(
        "init_from",
        fairseq="--finetune-from-model",
        marian="--pretrained-model",
        sockeye="--params",
        joeynmt="load_model",
        opennmt="train_from",
        also="pretrained init_checkpoint finetune_from",
    ),
    Foreign(
        "train.save_every",
        fairseq="--save-interval-updates",
        marian="--save-freq",
        opennmt="save_checkpoint_steps",
        hugging_face="save_steps",
        also="save_interval checkpoint_every",
    ),
    Foreign(
        "train.save_every",
        "`train.save_every` saves and `train.validate_every` validates",
        sockeye="--checkpoint-interval",
    ),
    Foreign(
        "train.validate_every",
        fairseq="--validate-interval-updates",
        marian="--valid-freq",
        joeynmt="validation_freq",
        opennmt="valid_steps",
        hugging_face="eval_steps",
        also="eval_every eval_interval val_interval valid_interval validate_interval val_check_interval",
    ),
    Foreign(
        "train.log_every",
        fairseq="--log-interval",
        marian="--disp-freq",
        joeynmt="logging_freq",
        opennmt="report_every",
        hugging_face="logging_steps",
        also="print_every log_freq",
    ),
    Foreign(
        "train.metric",
        fairseq="--best-checkpoint-metric",
        marian="--valid-metrics",
        sockeye="--optimized-metric",
        joeynmt="early_stopping_metric",
        opennmt="early_stopping_criteria",
        hugging_face="metric_for_best_model",
        also="monitor eval_metric eval_metrics",
    ),
    Foreign(
        "train.keep_last",
        fairseq="--keep-interval-updates",
        sockeye="--keep-last-params",
        opennmt="keep_checkpoint",
        hugging_face="save_total_limit",
        also="keep_checkpoints",
    ),
    Foreign(
        "train.keep_best",
        fairseq="--keep-best-checkpoints",
        marian="--keep-best",
        sockeye="--cache-last-best-params",
        joeynmt="keep_best_ckpts",
    ),
    Foreign("train.samples", joeynmt="print_valid_sents"),
    Foreign("train.seed", joeynmt="random_seed", also="manual_seed"),
    Foreign(
        "train.trackers",
        "every run writes `metrics.jsonl` and TensorBoard's files; `KEY` adds W&B or trackio",
        fairseq="--wandb-project",
        opennmt="tensorboard",
        hugging_face="report_to",
        also="wandb use_wandb",
    ),
    Foreign(
        "train.max_steps",
        "every validation translates and measures BLEU: no key is needed",
        fairseq="--eval-bleu",
        hugging_face="predict_with_generate",
    ),
    Foreign("train.max_steps", "every epoch is shuffled: no key is needed", joeynmt="shuffle"),
    # ---- search
    Foreign(
        "search.beam_size",
        fairseq="--beam",
        marian="--beam-size",
        sockeye="--beam-size",
        joeynmt="beam_size",
        opennmt="beam_size",
        hugging_face="num_beams",
        also="beam_width beams generation_num_beams",
    ),
    Foreign(
        "search.length_penalty",
        "it is `search.length_penalty`, the alpha of ((5 + length) / 6)^alpha",
        fairseq="--lenpen",
        marian="--normalize",
        sockeye="--length-penalty-alpha",
        joeynmt="beam_alpha",
        opennmt="alpha",
        hugging_face="length_penalty",
        also="len_pen length_normalization",
    ),
    Foreign(
        "search.max_extra",
        "a translation has at most `search.max_extra` pieces more than its source",
        fairseq="--max-len-a --max-len-b",
        marian="--max-length-factor",
        sockeye="--max-output-length",
        joeynmt="max_output_length",
        opennmt="max_length",
        hugging_face="max_new_tokens generation_max_length",
        also="max_len search.max_length",
    ),
    Foreign(
        "search.batch_tokens",
        "a batch of a search has `search.batch_tokens`: source pieces, padding counted, x beam",
        fairseq="--max-tokens --batch-size",
        marian="--mini-batch",
        sockeye="--batch-size",
        opennmt="batch_size valid_batch_size",
        hugging_face="per_device_eval_batch_size",
        also="search.batch_size eval_batch_size",
    ),
    Foreign(
        "n_best",
        fairseq="--nbest",
        marian="--n-best",
        sockeye="--nbest-size",
        opennmt="n_best",
        hugging_face="num_return_sequences",
    ),
    Foreign(
        "sample.top_k",
        "`sample.top_k`, `sample.top_p` or `sample.temperature` samples",
        fairseq="--sampling --sampling-topk --sampling-topp",
        marian="--output-sampling",
        opennmt="random_sampling_topk random_sampling_topp random_sampling_temp",
        hugging_face="do_sample",
    ),
    Foreign("align", fairseq="--print-alignment", marian="--alignment"),
)


def row_of(name: str, known: set[str]) -> tuple[str, str] | None:
    """What answers to a foreign name in a command that has the keys `known`: the key, and a sentence or "".

    None where the name is unknown, or no key of the command is meant by it.
    """
    for row in FOREIGN:
        if name in row.names():
            key = next((key for key in row.keys.split() if key in known), None)
            if key is not None:
                return key, row.here.replace("KEY", key)
    return None
