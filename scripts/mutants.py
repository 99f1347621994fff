"""Plants known defects, one at a time, and checks that the test named for each of them fails.

    python scripts/mutants.py               all of them
    python scripts/mutants.py "no fsync"    those whose name has one of these in it

A test that passes says little unless it fails where it should. Each mutant replaces one text of one file in a copy of
the tree, and the named test runs there, in a process forked from this one, which has imported torch already: a few
seconds each. First of all, the named tests must pass as the tree stands. A text that is not in its file exactly once is
an error: the list must be kept up with the code.

Prints a table for scripts/benchmark/results/, and ends with 1 if a mutant survives or cannot be planted.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "transformer",
    "tests",
    "scripts",
    "configs",
    "data",
    "docs",
    "pyproject.toml",
    "README.md",
)  # of the tree, for a copy
SLOW = ("torch._dynamo", "torch.utils.tensorboard", "sacrebleu", "sentencepiece", "omegaconf", "numpy")
TIMEOUT = 120  # seconds that a test may take; one that hangs has noticed the defect, too
CAUGHT, SURVIVED = 1, 0  # what pytest returns where a test failed, and where all passed


@dataclass(frozen=True)
class Mutant:
    """A defect: `old` becomes `new` in a file, named as seen from the package, and the test must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True)
class Verdict:
    """How the named test ended: what pytest returned, and the seconds that it took."""

    status: int
    seconds: float
    output: str


CRASH = "core/faults/test_checkpoint_faults.py::test_commit_leaves_the_old_or_the_new_after_a_crash_before_any_call"
POWER = "core/faults/test_checkpoint_faults.py::test_commit_that_was_reported_is_not_lost_by_a_power_cut"
DAMAGE = "core/unit/test_checkpoint.py::test_load_checkpoint_detects_and_names_damage"
STOP = "core/faults/test_resume.py::test_train_ends_the_same_resumed_at_every_step"
CORPUS = "core/faults/test_bad_corpora.py::test_prepare_refuses_a_bad_corpus_or_shifts_no_pair"

# What has gone wrong in trainers before.
REPORTED = (
    Mutant(
        "a small file is written in place",
        "files.py",
        "        write_new(temporary, data, mode=mode)\n        os.replace(temporary, path)",
        "        path.write_bytes(data)",
        f"{CRASH}[json]",
    ),
    Mutant(
        "a checkpoint is written in place",
        "checkpoint.py",
        "_fill(temporary, step, tensors=tensors, documents=documents)\n            _publish(temporary, target)",
        "_fill(target, step, tensors=tensors, documents=documents)",
        f"{CRASH}[first]",
    ),
    Mutant(
        "digests are not compared", "sealed_folder.py", "if sha256 != expected.sha256:", "if False:", f"{DAMAGE}[flip]"
    ),
    Mutant(
        "a file that the manifest lacks is let through",
        "sealed_folder.py",
        "{*self.manifest.files, *os.listdir(self.folder)}",
        "{*self.manifest.files}",
        f"{DAMAGE}[add]",
    ),
    Mutant(
        "a checkpoint of another step is let through",
        "checkpoint.py",
        "if step_of(path.name) is not None and path.name != step_name(manifest.step):",
        "if False:",
        f"{DAMAGE}[be_another_step]",
    ),
    Mutant(
        "a start of zeros is trained by what the output learns",
        "model/layers.py",
        "            gradient[row].zero_()",
        "            pass",
        "core/unit/test_step.py::test_train_step_never_moves_a_start_of_zeros",
    ),
    Mutant(
        "a file is synced before it is written",
        "files.py",
        "        rest = memoryview(data)\n        while rest:\n            rest = rest[os.write(file, rest) :]\n"
        "        os.fsync(file)",
        "        os.fsync(file)\n        rest = memoryview(data)\n        while rest:\n"
        "            rest = rest[os.write(file, rest) :]",
        POWER,
    ),
    Mutant("no fsync of a file", "files.py", "        os.fsync(file)\n", "", POWER),
    Mutant("no fsync of a new checkpoint's names", "sealed_folder.py", "    sync(folder)\n", "", POWER),
    Mutant(
        "no fsync of the directory of checkpoints",
        "checkpoint.py",
        "    sync(target.parent)  #",
        "    #",
        POWER,
    ),
    Mutant(
        "no fsync of what is about to be removed",
        "checkpoint.py",
        "            sync(run.checkpoints)\n",
        "            pass\n",
        POWER,
    ),
    Mutant("no fsync at the start", "files.py", "        sync(folder)  #", "        pass  #", POWER),
    Mutant(
        "the old checkpoint is removed before the new one is there",
        "checkpoint.py",
        "                os.rename(target, old)",
        "                remove(target)",
        f"{CRASH}[again]",
    ),
    Mutant(
        "two renames, and what was moved aside does not return at the next start",
        "files.py",
        "            put_back(folder / name, folder / name.removeprefix(REPLACED))",
        "            remove(folder / name)",
        f"{CRASH}[again]",
    ),
    Mutant(
        "another attempt writes into what the first one left",
        "checkpoint.py",
        "    for attempt in range(1, ATTEMPTS + 1):\n        temporary = temporary_name(target, UNFINISHED)",
        "    temporary = temporary_name(target, UNFINISHED)\n    for attempt in range(1, ATTEMPTS + 1):\n        pass",
        "core/faults/test_checkpoint_faults.py::test_commit_tries_again_without_what_the_first_attempt_left",
    ),
    Mutant(
        "rotation may remove the newest",
        "checkpoint.py",
        "for step in list_steps(run_dir)[:-1] if step not in keep]",
        "for step in list_steps(run_dir) if step not in keep]",
        "core/unit/test_checkpoint.py::test_rotate_keeps_what_it_is_told_and_always_the_newest",
    ),
    Mutant(
        "the space on the disk is not asked for",
        "checkpoint.py",
        "            _check_space(target.parent, needed)\n",
        "",
        "core/faults/test_checkpoint_faults.py::test_commit_checks_the_space_before_it_writes_anything",
    ),
    Mutant(
        "training begins where no checkpoint would fit",
        "training/saving.py",
        "check_space(run.directory.path, run.state.checkpoint_bytes)",
        "None",
        "core/faults/test_faults_disk.py::test_train_refuses_before_the_first_step_where_no_checkpoint_would_fit",
    ),
    Mutant(
        "all checkpoints damaged: the run begins anew",
        "checkpoint.py",
        '        raise CheckpointError(f"no checkpoint can be verified',
        '        log.warning(f"no checkpoint can be verified',
        "core/faults/test_resume.py::test_resume_touches_nothing_where_all_checkpoints_are_damaged",
    ),
    Mutant(
        "dropout is not seeded",
        "training/step.py",
        "            seed_draws(seed, self.device)\n",
        "",
        f"{STOP}[5]",
    ),
    Mutant(
        "the order comes from a global generator",
        "data/plan.py",
        "random = np.random.PCG64(seed_for(seed, epoch, chapter) if chapter else seed_for(seed, epoch))\n",
        "random = np.random.PCG64(np.random.randint(1 << 30))\n",
        f"{STOP}[5]",
    ),
    Mutant(
        "the step in the chapter is not restored",
        "training/loop.py",
        "run.progress.chapter, run.progress.step_in_chapter)",
        "run.progress.chapter, 0)",
        f"{STOP}[8]",
    ),
    Mutant(
        "the chapter is not restored",
        "training/loop.py",
        "position=Position(run.progress.epoch, run.progress.chapter,",
        "position=Position(run.progress.epoch, 0,",
        "core/commands/test_train_chapters.py::test_train_resumes_in_any_chapter",
    ),
    Mutant(
        "the chapters of all epochs are the same",
        "data/chapters.py",
        "seed_for(seed, epoch, _CHAPTERS, number)",
        "seed_for(seed, _CHAPTERS, number)",
        "core/unit/test_chapters.py::test_chapter_pairs_are_others_in_each_epoch",
    ),
    Mutant(
        "the chapters of an epoch have the same dropout masks",
        "data/loader.py",
        "return (self.epoch, self.chapter, self.index) if self.chapter else (self.epoch, self.index)",
        "return (self.epoch, self.index)",
        "core/unit/test_loader.py::test_step_has_seeds_of_its_own",
    ),
    Mutant(
        "the epoch is not restored",
        "training/loop.py",
        "position=Position(run.progress.epoch, run.progress.chapter,",
        "position=Position(0, run.progress.chapter,",
        f"{STOP}[8]",
    ),
    Mutant(
        "Adam's moments are not restored",
        "training/state.py",
        "            load_moments(self.model, self.optimizer, moments)",
        "            pass",
        f"{STOP}[5]",
    ),
    Mutant(
        "Adam's count of updates is not restored",
        "training/optimizer.py",
        'state["step"] = updates.to(parameter.device, copy=True)',
        'state["step"] = torch.zeros_like(updates)',
        f"{STOP}[5]",
    ),
    Mutant(
        "the schedule stands still",
        "training/optimizer.py",
        "    update = step + 1",
        "    update = 1",
        "core/commands/test_train.py::test_train_logs_the_rate_of_equation_3",
    ),
    Mutant(
        "the moving average is not restored",
        "training/state.py",
        "                _load_finite(self.ema, checkpoint, EMA)",
        "                _load_finite(self.ema, checkpoint, MODEL)",
        "core/commands/test_train_settings.py::test_train_resumes_under_every_recipe[moving average]",
    ),
    Mutant(
        "the moving average's warm-up begins anew",
        "training/optimizer.py",
        "    updates = updates.double()",
        "    updates = 0.0 * updates.double()",
        "core/unit/test_ema.py::test_train_moves_the_average_after_each_update",
    ),
    Mutant(
        "the loss scale is not restored",
        "training/state.py",
        "        if scale is not None and self.scaler.is_enabled():\n",
        "        if False:\n",
        "core/faults/test_resume.py::test_loss_scale_goes_on_over_a_resume[7]",
    ),
    Mutant(
        "patience counts all validations",
        "records.py",
        "len(keys) - 1 - keys.index(best)",
        "len(keys) - 1",
        "core/faults/test_faults_resume.py::test_train_decides_the_same_stopped_after_every_validation",
    ),
    Mutant(
        "the best score is forgotten",
        "training/state.py",
        "        self.progress = training.progress\n",
        "        self.progress = training.progress\n        self.progress.validations = []\n",
        "core/faults/test_faults_resume.py::test_train_decides_the_same_stopped_after_every_validation",
    ),
    Mutant(
        "NaN is the best score",
        "records.py",
        "            return -math.inf\n",
        "            return math.inf\n",
        "core/faults/test_faults_resume.py::test_train_decides_the_same_stopped_after_every_validation",
    ),
    Mutant(
        "an equal score counts as better",
        "records.py",
        "len(keys) - 1 - keys.index(best)",
        "keys[::-1].index(best)",
        "core/faults/test_faults_resume.py::test_train_decides_the_same_stopped_after_every_validation",
    ),
    Mutant(
        "the sums between two log lines are not restored",
        "training/state.py",
        "        self.window.restore(training.window, rank=rank)\n",
        "",
        "core/faults/test_resume.py::test_log_window_goes_on_after_a_signal[6]",
    ),
    Mutant(
        "TensorBoard keeps the steps after the checkpoint",
        "tracking.py",
        "purge_step=step + 1",
        "purge_step=None",
        "core/unit/test_tracking.py::test_tracker_writes_no_step_twice_and_misses_none[falls back]",
    ),
    Mutant(
        "metrics.jsonl keeps the steps after the checkpoint",
        "tracking.py",
        " if of_step <= step))",
        "))",
        "core/unit/test_tracking.py::test_tracker_writes_no_step_twice_and_misses_none[falls back]",
    ),
    Mutant(
        "what a tracker says of a failure is logged with its secrets",
        "integrations/trackers/service.py",
        'text = text.replace(value, f"${name}")',
        "pass",
        "integrations/test_sink.py::test_sink_says_once_why_a_tracker_has_failed[init says what is secret]",
    ),
    Mutant(
        "steps that a killed training has sent are sent again",
        "tracking.py",
        "if step >= self._last_sent else ()",
        "",
        "integrations/test_sink.py::test_tracker_sends_no_step_twice_after_it_fell_back",
    ),
    Mutant(
        "the gradient is a mean of micro-batches, not over the step's tokens",
        "training/step.py",
        "/ step.target_tokens\n",
        "/ (len(batches) * int((batches[0][1].target_out != 0).sum()))\n",
        "core/unit/test_step.py::test_train_step_of_any_split_gives_the_mean_gradient_over_target_tokens",
    ),
    Mutant(
        "ranks that replay their steps keep their gradients to themselves",
        "training/cuda_graphs.py",
        "dist.all_reduce(flat)",
        "pass",
        "core/unit/test_cuda_graphs.py::test_graphed_computation_of_several_ranks_is_that_of_ddp[2]",
    ),
    Mutant(
        "a gradient is added to that of the step before",
        "training/cuda_graphs.py",
        "self._flat.zero_()",
        "pass",
        "core/unit/test_cuda_graphs.py::test_graphed_computation_is_the_launched_one[OptimizerKind.adam]",
    ),
    Mutant(
        "a step that could not be recorded is recorded again",
        "training/loop.py",
        "    run.prover.leave(run.resolved, failure)\n",
        "",
        "core/unit/test_proof.py::test_train_ends_with_a_commit_where_a_step_could_not_be_recorded[1]",
    ),
    Mutant(
        "a tile may have more keys than it holds",
        "data/packing.py",
        " or key_at + n_keys - key_first > size",
        "",
        "core/unit/test_layout.py::test_packed_tiles_by_hand",
    ),
    Mutant(
        "lines end where str.splitlines says",
        "data/corpus.py",
        'lines = text.split("\\n")',
        "lines = text.splitlines()",
        CORPUS,
    ),
    Mutant(
        "one side may have more lines than the other",
        "data/corpus.py",
        "zip(source_lines, target_lines, strict=True)",
        "zip(source_lines, target_lines, strict=False)",
        CORPUS,
    ),
    Mutant(
        "what is not UTF-8 is replaced",
        "data/corpus.py",
        'return block.decode("utf-8")',
        'return block.decode("utf-8", "replace")',
        CORPUS,
    ),
    Mutant(
        "a translation memory may declare entities",
        "integrations/tmx.py",
        "        if has_declarations:",
        "        if False:",
        "integrations/test_tmx.py::test_read_tmx_refuses_in_one_line[external entity]",
    ),
    Mutant(
        "a damaged stream behind another one is left out",
        "data/compression.py",
        "        self._decompressor.decompress(rest, 0)\n        return True",
        "        return False",
        "core/unit/test_corpus.py::test_read_lines_takes_compressed_files_end_to_end[.xz]",
    ),
    Mutant(
        "shards without a counterpart are left out",
        "data/shards.py",
        "    if len(sources) != len(targets):",
        "    if False:",
        "core/unit/test_shards.py::test_pair_up_names_a_file_without_a_counterpart",
    ),
    Mutant(
        "what is no safetensors file is unpickled",
        "checkpoint.py",
        '            raise CheckpointError(f"{path}: not a safetensors file: {error}") from error',
        "            tensors = torch.load(path, weights_only=False)",
        "core/unit/test_checkpoint.py::test_load_checkpoint_refuses_what_is_no_safetensors_file_and_does_not_run_it[pickle]",
    ),
    Mutant(
        "torch.load is called",
        "checkpoint.py",
        "tensors = safetensors.torch.load(data)",
        "tensors = safetensors.torch.load(data) or torch.load(path)",
        "scripts/test_architecture.py::test_modules_call_nothing_unsafe_or_loud",
    ),
    Mutant(
        "blank lines go to the model",
        "decoding/translator.py",
        "not_blank = [n for n, text in enumerate(texts) if not is_blank(text)]",
        "not_blank = list(range(len(texts)))",
        "core/commands/test_translate.py::test_translator_gives_blank_for_blank_without_the_model",
    ),
    Mutant(
        "a tag without a text goes to the model",
        "data/corpus.py",
        "return source if tag is None or is_blank(source) else",
        "return source if tag is None else",
        "core/commands/test_tags.py::test_prepare_leaves_blank_sources_of_evaluation_sets_blank",
    ),
    Mutant(
        "corpora under different tags share a store",
        "data/training_text.py",
        '[{"tag": tag}]',
        "[]",
        "core/commands/test_tags.py::test_prepare_names_a_corpus_by_its_tags",
    ),
    Mutant(
        "a tag is cut into the pieces of words",
        "data/tokenizer.py",
        "user_defined_symbols=[SPACE + tag for tag in tags]",
        "user_defined_symbols=[]",
        "core/commands/test_tags.py::test_prepare_puts_one_piece_in_front_of_each_source",
    ),
)

# What passed every test when it was first tried.
SURVIVORS = (
    Mutant(
        "the dev loss is divided by target tokens without their ends",
        "training/validate.py",
        "int(dev.lengths.totals[1])).tolist()",
        "(int(dev.lengths.totals[1]) - len(dev))).tolist()",
        "core/unit/test_validate.py::test_dev_loss_is_a_mean_over_target_tokens_with_their_ends",
    ),
    Mutant(
        "the average is divided by the checkpoints asked for, not by those used",
        "average.py",
        "(total / len(used))",
        "(total / len(steps))",
        "core/commands/test_train.py::test_average_is_the_mean_of_the_sound_checkpoints",
    ),
    Mutant(
        "dropout falls on the residual, too",
        "model/layers.py",
        "total = add_dropout(x, y, self.dropout, training=self.training)",
        "total = add_dropout(0 * x, x + y, self.dropout, training=self.training)",
        "core/unit/test_model.py::test_add_norm_drops_nothing_of_the_residual",
    ),
    Mutant(
        "a beam considers K candidates",
        "decoding/search.py",
        "    order = order[:, : 2 * beam_size]  # (B, C)\n",
        "    order = order[:, : 2 * beam_size]  # (B, C)\n    totals[:, beam_size:] = _IMPOSSIBLE\n",
        "core/unit/test_search.py::test_beam_search_considers_twice_as_many_candidates_as_it_keeps",
    ),
    Mutant(
        "a beam considers K + 1 candidates",
        "decoding/search.py",
        "    order = order[:, : 2 * beam_size]  # (B, C)\n",
        "    order = order[:, : 2 * beam_size]  # (B, C)\n    totals[:, beam_size + 1 :] = _IMPOSSIBLE\n",
        "core/unit/test_search.py::test_beam_search_considers_twice_as_many_candidates_as_it_keeps",
    ),
    Mutant(
        "a beam considers K continuations of a hypothesis",
        "decoding/search.py",
        "width = min(2 * beam_size, logits.shape[1])",
        "width = min(beam_size, logits.shape[1])",
        "core/unit/test_search.py::test_beam_search_considers_more_continuations_of_one_hypothesis_than_it_keeps",
    ),
    Mutant(
        "the initial weights do not depend on the seed",
        "training/state.py",
        "torch.manual_seed(seed_for(seed))",
        "torch.manual_seed(seed_for(1))",
        "core/commands/test_train.py::test_train_seed_draws_the_initial_weights",
    ),
    Mutant(
        "a beam's scores are summed in float32",
        "decoding/search.py",
        "    totals = live_log_probs.unsqueeze(2) + log_probs.view(n_sentences, beam_size, width)",
        "    totals = (live_log_probs.unsqueeze(2).float() + log_probs.view(n_sentences, beam_size, width)).double()",
        "core/unit/test_search.py::test_beam_search_sums_in_float64_what_a_model_computes_in_float32",
    ),
    Mutant(
        "sentences that are done go on where steps are replayed",
        "decoding/replay.py",
        "torch.where(was_done.view(-1, *[1] * (own.ndim - 1)), own, new, out=own)",
        "own.copy_(new)",
        "core/unit/test_replayed_search.py::test_replay_finds_what_the_plain_loop_finds",
    ),
    Mutant(
        "dev BLEU is counted on lower-cased text",
        "training/validate.py",
        "bleu = measure_bleu(found, dev.references, tgt_lang=tgt_langs[name], tokenize=tokenize)",
        "lower = [[text.lower() for text in texts] for texts in (found, dev.references)]\n"
        "        bleu = measure_bleu(*lower, tgt_lang=tgt_langs[name], tokenize=tokenize)",
        "core/unit/test_validate.py::test_validate_scores_cased_text",
    ),
)

# What attacks on this package found, or its own tests must find.
FOUND = (
    Mutant(
        "the tokenizer is not verified",
        "run_dir.py",
        "            if here != there:",
        "            if False:",
        "core/faults/test_hostile_runs.py::test_tokenizer_with_one_flipped_bit_is_refused",
    ),
    Mutant(
        "targets are encoded with the source's tokenizer",
        "data/building.py",
        "target=Sentences.of(tokenizers.target.encode(targets))",
        "target=Sentences.of(tokenizers.source.encode(targets))",
        "core/commands/test_two_vocabularies.py::test_prepare_trains_a_tokenizer_on_each_side_and_encodes_with_it",
    ),
    Mutant(
        "a part of other text is joined",
        "data/parts.py",
        "seal_of([to_json(self), number])",
        "seal_of([number])",
        "core/commands/test_prepare_parts.py::test_prepare_refuses_a_part_of_other_text_than_part_0_has_read",
    ),
    Mutant(
        "a part is encoded of whatever text is there",
        "data/parts.py",
        "                _check_unchanged(shard, of_shard, plan.parts)\n",
        "",
        "core/commands/test_prepare_parts.py::test_prepare_refuses_a_part_of_other_text_than_part_0_has_read",
    ),
    Mutant(
        "a part is not made of whole blocks",
        "data/parts.py",
        "building.BLOCK * (blocks * part // parts)",
        "kept.count(1) * part // parts",
        "core/commands/test_prepare_parts.py::test_prepare_in_parts_comes_to_the_same",
    ),
    Mutant(
        "stores are joined with the offsets that they had",
        "data/store.py",
        "(offsets[start : start + BLOCK] + total).tobytes()",
        "offsets[start : start + BLOCK].tobytes()",
        "core/unit/test_store.py::test_store_that_was_joined_is_like_one_that_was_written_at_once",
    ),
    Mutant(
        "references of the development set are encoded with the source's tokenizer",
        "training/validate.py",
        "target_pieces = tokenizers.target.encode(references)",
        "target_pieces = tokenizers.source.encode(references)",
        "core/commands/test_two_vocabularies.py::test_dev_set_is_in_the_pieces_of_each_side",
    ),
    Mutant(
        "both sides are sampled with the source's tokenizer",
        "data/epochs.py",
        "sampled = sampler.sample(",
        "sampled = self._samplers[0].sample(",
        "core/commands/test_two_vocabularies.py::test_epoch_stores_sample_each_side_with_its_own_tokenizer",
    ),
    Mutant(
        "the test sets are not verified",
        "evaluation/sets.py",
        "    if digest_sets(own) != results.test_digest:",
        "    if False:",
        "core/faults/test_hostile_runs.py::test_evaluate_refuses_test_sets_that_changed",
    ),
    Mutant(
        "the store is not verified",
        "data/store.py",
        "                folder.verify()",
        "                pass",
        "core/unit/test_store.py::test_store_open_finds_every_flipped_bit_cut_and_missing_file",
    ),
    Mutant(
        "the shapes of Adam's moments are not compared",
        "training/optimizer.py",
        "        if moment.shape != parameter.shape:",
        "        if False:",
        "core/faults/test_hostile_runs.py::test_load_moments_refuses_in_a_process_of_its_own",
    ),
    Mutant(
        "numbers that are not finite are not looked for",
        "checkpoint.py",
        "torch.isfinite(tensor).all() for tensor in",
        "torch.ones((), dtype=torch.bool) for tensor in",
        "core/faults/test_hostile_runs.py::test_train_refuses_to_resume_from_weights_that_are_not_finite",
    ),
    Mutant(
        "a path passes for the commit of a model",
        "data/hub.py",
        "isinstance(answer, str) and COMMIT.fullmatch(answer)",
        "isinstance(answer, str)",
        "integrations/test_push.py::test_run_dir_on_the_hub_has_a_commit_and_no_path",
    ),
    Mutant(
        "a directory of somebody else makes way for what is built",
        "files.py",
        "    if not is_replaceable:",
        "    if False:",
        "core/unit/test_files.py::test_build_once_removes_nothing_that_it_has_not_made",
    ),
    Mutant(
        "push sends a metrics.jsonl as it is",
        "tools/metrics.py",
        "if _NAME.fullmatch(name)}",
        "if name}",
        "integrations/test_push.py::test_push_sends_of_metrics_what_it_understands",
    ),
    Mutant(
        "what a kill left of a store is not cleared",
        "files.py",
        "    remove(temporary)  #",
        "    #",
        "core/faults/test_faults_disk.py::test_train_recovers_from_a_kill_before_a_call[the store]",
    ),
    Mutant(
        "what a kill left of translations is not cleared",
        "run_dir.py",
        "for folder in (run.path, run.checkpoints, run.hypotheses, run.judges):",
        "for folder in (run.path, run.checkpoints, run.judges):",
        "core/faults/test_faults_disk.py::test_train_recovers_from_a_kill_before_a_call[translations]",
    ),
    Mutant(
        "the lock's error hides that of a failing disk",
        "run_dir.py",
        "with suppress(OSError):",
        "with suppress(KeyError):",
        "core/faults/test_faults_disk.py::test_train_recovers_from_an_error_of_a_call",
    ),
    Mutant(
        "a rotation that a kill cut short is not made up for",
        "training/saving.py",
        "        world.from_rank0(lambda: _rotate(run.directory, config, progress))\n",
        "        pass\n",
        "core/faults/test_faults_disk.py::test_train_recovers_from_a_kill_before_a_call",
    ),
    Mutant(
        "TensorBoard's thread ends with a traceback",
        "cli/main.py",
        "    threading.excepthook = _end_thread\n",
        "",
        "core/faults/test_faults_disk.py::test_train_ends_without_a_traceback_where_the_thread_of_tensorboard_fails",
    ),
    Mutant(
        "scores of another average beside new translations",
        "training/finish.py",
        "        remove(run.directory.results)  #",
        "        pass  #",
        "core/commands/test_train.py::test_train_that_dies_while_it_scores_leaves_no_scores_of_the_translations_before",
    ),
    Mutant(
        "a state of many dev sets that is too large to be read",
        "records.py",
        "        if validation.sets:",
        "        if False:",
        "core/unit/test_window.py::test_progress_of_many_directions_never_outgrows_what_is_read_back",
    ),
    Mutant(
        "results are not made again after a kill",
        "training/finish.py",
        "    if not world.from_rank0(lambda: is_finished(run)):\n",
        '    if not (run.directory.hypotheses / "test.hyp").exists():\n',
        "core/faults/test_faults_disk.py::test_train_recovers_from_a_kill_before_a_call[results.json]",
    ),
    Mutant(
        "a score that only a run names is executed",
        "evaluation/metrics.py",
        "        if name in chosen:\n            continue\n",
        "        registry.allow(name)\n        if name in chosen:\n            continue\n",
        "tools/test_plugin_scores.py::test_evaluate_executes_nothing_that_only_a_run_names",
    ),
    Mutant(
        "a score of another package is given references in place of sources",
        "evaluation/sets.py",
        "sources=[source for source, _ in pairs]",
        "sources=[reference for _, reference in pairs]",
        "tools/test_plugin_scores.py::test_train_keeps_the_score_in_its_results",
    ),
    Mutant(
        "an error of Python has as many lines as a name in it",
        "errors.py",
        "        return printable(super().__str__())\n",
        "        return super().__str__()\n",
        "core/unit/test_api.py::test_errors_are_of_one_line_whatever_a_run_is_called",
    ),
    Mutant(
        "a run of changed code is refused without its commit",
        "run_dir.py",
        '        return "" if theirs == ours else',
        '        return "" if theirs.partition(",")[0] == ours.partition(",")[0] else',
        "core/commands/test_translate.py::test_what_another_version_wrote_is_refused_with_its_name[run.json]",
    ),
    Mutant(
        "F1 counts a word once a sentence",
        "tools/compare/words.py",
        "Counter(translation) & Counter(reference)",
        "Counter(set(translation) & set(reference))",
        "tools/test_compare.py::test_compare_counts_a_word_as_often_as_a_sentence_has_it",
    ),
    Mutant(
        "a run that diverged is the best of a table",
        "tools/tables/runs.py",
        "math.isfinite(run.best_dev) else math.inf",
        "math.isfinite(run.best_dev) else -math.inf",
        "tools/test_run_table.py::test_table_of_a_folder_has_a_run_that_diverged_last",
    ),
    Mutant(
        "the own position of a query is rounded down",
        "tools/attention/heads.py",
        ".round().long()",
        ".long()",
        "tools/test_heads.py::test_head_meter_rounds_the_own_position_of_a_query_to_the_nearest_key",
    ),
    Mutant(
        "alignments take no layer that the encoder lacks",
        "decoding/forced.py",
        "last = model.config.decoder_layers - 1",
        "last = min(model.config.decoder_layers, model.config.n_layers) - 1",
        "core/unit/test_forced.py::test_align_is_the_largest_mean_weight_of_the_last_layer",
    ),
    Mutant(
        "pieces that BPE cannot reach are cut",
        "data/subwords.py",
        "spelling.without(merges.unreachable(spelling))",
        "spelling",
        "core/unit/test_subwords.py::test_sampler_of_bpe_keeps_a_piece_that_no_merges_lead_to",
    ),
    Mutant(
        "line ends of Windows are no other bytes",
        "data/corpus.py",
        '    (b"\\r\\n", 0),\n',
        "",
        "core/unit/test_corpus.py::test_digest_lines_says_whether_a_file_has_the_digest_of_its_lines",
    ),
    Mutant(
        "the doctor does not put sides in order",
        "tools/doctor/languages.py",
        "survey.exchanged() if survey.name in exchanged else survey for",
        "survey for",
        "tools/test_doctor.py::test_doctor_finds_a_planted_fault[sides exchanged in train]",
    ),
    Mutant(
        "a source language that is no code is not said",
        "tools/first_look.py",
        "            found.append(str(error))\n",
        "            pass\n",
        "tools/test_first_look.py::test_plain_faults_are_said",
    ),
    Mutant(
        "IBM model 1 without the expectation's denominator",
        "tools/detectors/lexicon.py",
        "            weights /= sums_of(links.tokens, weights, size=0)[links.tokens]\n",
        "",
        "tools/test_doctor.py::test_lexicon_learns_ibm_model_1",
    ),
    Mutant(
        "a published model: smoothing takes no account of the biases of the output",
        "kernels/loss.py",
        "rows.to(wide) @ sum_of_all + sum_of_biases - z_y",
        "rows.to(wide) @ sum_of_all - z_y",
        "core/unit/test_kernels.py::test_linear_cross_entropy_and_its_gradients_are_those_written_out",
    ),
    Mutant(
        "a published model: its channels stay in Marian's order",
        "integrations/published/names.py",
        "    return channels_of(d_model).argsort()\n",
        "    return channels_of(d_model)\n",
        "integrations/test_import.py::test_import_computes_their_logits",
    ),
    Mutant(
        "a published model: padding has a probability",
        "integrations/published/marian.py",
        "gathered[list(NEVER)] = NO_PROBABILITY",
        "gathered[list(NEVER)] = 0.0",
        "integrations/test_import.py::test_import_computes_their_logits",
    ),
    Mutant(
        "sweeps do not start on Python 3.14",
        "cli/application.py",
        "with stored, application.launching(), _any_help_taken():\n",
        "with stored, application.launching():\n",
        "tools/test_cli.py::test_main_sweeps_where_argparse_checks_help_as_that_of_python_3_14_does",
    ),
    Mutant(
        "shares of ranks are balanced by count",
        "decoding/ranks.py",
        "        loads[rank] += works[item]\n",
        "        loads[rank] += 1\n",
        "core/unit/test_ranks.py::test_deal_gives_the_largest_to_who_has_the_least",
    ),
    Mutant(
        "ranks leave the remainder of the dev set out",
        "training/validate.py",
        "    ranks = deal([len(ids) for ids in sources.values()], world.size)\n",
        "    ranks = [n * world.size // 6 for n in range(len(sources))]\n",
        "core/unit/test_validate.py::test_validate_on_three_ranks_is_that_of_one",
    ),
    Mutant(
        "a line of several sentences is passed over in silence",
        "decoding/translate_stream.py",
        "{} if self.line_check is None else self.line_check.count(texts)",
        "{}",
        "tools/test_sentences.py::test_translate_warns_once_of_lines_unlike_those_of_training",
    ),
    Mutant(
        "ranks do not see what others work on",
        "shared_work.py",
        "fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)",
        "pass",
        "core/commands/test_bulk.py::test_ranks_share_the_blocks_and_make_each_once",
    ),
    Mutant(
        "an output is gone on with by other settings",
        "decoding/provenance.py",
        "keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]",
        "keys: list[str] = []",
        "core/commands/test_bulk.py::test_translate_refuses_other_settings_for_what_it_began_or_finished[False]",
    ),
    Mutant(
        "an input changes while it is translated",
        "decoding/bulk.py",
        "        text.check()\n",
        "        pass\n",
        "core/commands/test_bulk.py::test_translate_keeps_nothing_of_an_input_that_changes",
    ),
    Mutant(
        "a checkpoint of float64 is rounded as it is loaded",
        "decoding/loading.py",
        "            model = model.double()\n",
        "            pass\n",
        "core/commands/test_translate.py::test_load_translator_keeps_weights_of_float64",
    ),
    Mutant(
        "biases of attention are not imported where the output has none",
        "integrations/published/marian.py",
        'if name.endswith("_proj.bias")]',
        "if False]",
        "integrations/test_import.py::test_import_has_biases_of_attention_where_that_of_the_output_is_zero",
    ),
    Mutant(
        "a published penalty of length upside down",
        "integrations/published/marian.py",
        "exponent * (5.0 + USUAL_LENGTH) / USUAL_LENGTH",
        "exponent * USUAL_LENGTH / (5.0 + USUAL_LENGTH)",
        "integrations/test_import.py::test_import_takes_their_beam_and_a_penalty_that_grows_like_theirs",
    ),
    Mutant(
        "settings of generate vanish without a word",
        "integrations/published/marian.py",
        "if value and value != UNDONE[key]]",
        "if False]",
        "integrations/test_import.py::test_import_names_what_changes_their_translations_and_is_not_done",
    ),
    Mutant(
        "a pair vouches for itself",
        "tools/detectors/alignment.py",
        "chosen = pairs[halves[pairs // BLOCK] != parity]",
        "chosen = pairs[halves[pairs // BLOCK] == parity]",
        "tools/test_cleaning.py::test_find_faults_asks_no_pair_about_itself",
    ),
    Mutant(
        "a share of the pairs of any length is kept",
        "tools/synthetic.py",
        "means.update(block.means[~block.lengths.are_outliers(usual)].tolist())",
        "means.update(block.means.tolist())",
        "tools/test_synthetic.py::test_pairs_keep_a_share_of_those_of_usual_length",
    ),
    Mutant(
        "verify takes other threads for the same condition",
        "tools/verify/command.py",
        "for name, value in to_json(start.resolved).items()}",
        'for name, value in to_json(start.resolved).items() if name != "threads"}',
        "tools/test_verify.py::test_verify_names_other_threads_as_a_condition",
    ),
    Mutant(
        "what a judge has started in a session of its own outlives it",
        "tools/program_process.py",
        "prctl(_PR_SET_CHILD_SUBREAPER, 1,",
        "prctl(_PR_SET_CHILD_SUBREAPER, 0,",
        "integrations/test_judges.py::test_judge_is_ended_with_what_it_has_started[a daemon-is done]",
    ),
    Mutant(
        "a tensor stands for more numbers than its file has",
        "integrations/published/marian.py",
        "tensor.numel() * tensor.element_size() <= tensor",
        "0 <= tensor",
        "integrations/test_import.py::test_import_refuses_in_a_line[a tensor that is expanded]",
    ),
    Mutant(
        "a judge's first number is the system's score",
        "integrations/judges.py",
        "(numbers[0] if len(numbers) == 1 else None)",
        "(numbers[0] if numbers else None)",
        "integrations/test_judges.py::test_judge_takes_neither_of_two_numbers_for_the_system_s_score",
    ),
    Mutant(
        "a detector overrules the verdict on a duplicate",
        "data/screening.py",
        "if fault is None or codes[index] != KEPT:",
        "if fault is None:",
        "tools/test_cleaning.py::test_prepare_counts_a_pair_under_the_first_reason_to_drop_it",
    ),
    Mutant(
        "a full step has a block of slots more",
        "data/plan.py",
        "return _round_up(source, SLOTS), _round_up(target, SLOTS)",
        "return _round_up(source + 1, SLOTS), _round_up(target + 1, SLOTS)",
        "core/unit/test_plan.py::test_slots_for_rounds_up_to_whole_blocks_alone",
    ),
    Mutant(
        "a gradient a tenth too large is taken for rounding",
        "training/deviation.py",
        "length), tolerance.norm)",
        "length), 1.0)",
        "core/unit/test_proof.py::test_compare_sees_a_matrix_whose_gradient_is_too_large",
    ),
    Mutant(
        "verify does not look at the weights of checkpoints",
        "tools/verify/command.py",
        "digest_tensors(checkpoint.tensors(MODEL)))",
        "marks[step])",
        "tools/test_verify.py::test_verify_finds_other_weights_than_those_of_the_training[checkpoints/step-00000008-4]",
    ),
    Mutant(
        "verify does not look at the average",
        "tools/verify/command.py",
        "found.same(name, digest_tensors(mean), digest_tensors(average.weights()))",
        "found.same(name, digest_tensors(mean), digest_tensors(mean))",
        "tools/test_verify.py::test_verify_finds_other_weights_than_those_of_the_training[averaged-4]",
    ),
    Mutant(
        "verify does not look at the dev set",
        "tools/verify/command.py",
        "before.dev_digest, now.dev_digest)",
        "before.dev_digest, before.dev_digest)",
        "tools/test_verify.py::test_verify_finds_another_dev_set",
    ),
    Mutant(
        "a part in the place of another is joined",
        "data/parts.py",
        "seal_of([to_json(self), number])",
        "seal_of([to_json(self)])",
        "core/commands/test_prepare_parts.py::test_prepare_joins_no_part_in_the_place_of_another",
    ),
    Mutant(
        "a kept block is not compared with its digest",
        "decoding/bulk.py",
        "if seal != self._seal(first, last, data):",
        "if False:",
        "core/commands/test_bulk.py::test_translate_makes_a_kept_block_again_that_does_not_fit",
    ),
    Mutant(
        "the digest of a block does not know its lines",
        "decoding/bulk.py",
        "seal_of([self.settings, first, last], data)",
        "seal_of(self.settings, data)",
        "core/commands/test_bulk.py::test_translate_makes_a_kept_block_again_that_does_not_fit",
    ),
    Mutant(
        "blocks without settings are gone on with",
        "decoding/bulk.py",
        "        elif self.lines():\n",
        "        elif False:\n",
        "core/commands/test_bulk.py::test_translate_goes_on_with_no_blocks_of_unknown_settings",
    ),
    Mutant(
        "an input that changed unseen is joined",
        "decoding/bulk.py",
        "            text.check_all()\n",
        "            pass\n",
        "core/commands/test_bulk.py::test_translate_joins_nothing_of_an_input_that_changed_unseen",
    ),
    Mutant(
        "the least probable pairs are kept",
        "tools/synthetic.py",
        "(block.means >= least)",
        "(block.means <= least)",
        "tools/test_synthetic.py::test_pairs_keep_the_most_probable_share_of_all_blocks",
    ),
    Mutant(
        "a translation that was cut is trained on",
        "tools/synthetic.py",
        "    if not translation.finished:\n        return UNFINISHED\n",
        "",
        "tools/test_synthetic.py::test_pairs_drop_what_is_unsound_however_probable_it_is",
    ),
    Mutant(
        "a loss divides by a rounded number",
        "kernels/loss.py",
        "(tensor * factor.view(1, 1)).to(tensor.dtype)",
        "tensor * factor.to(tensor.dtype)",
        "core/unit/test_kernels.py::test_linear_cross_entropy_rounds_no_factor_to_the_type_of_the_hidden_states",
    ),
    Mutant(
        "the bootstrap's p marks a difference",
        "tools/significance.py",
        "self.p_randomisation is not None and self.p_randomisation <= SIGNIFICANT",
        "self.p_bootstrap is not None and self.p_bootstrap <= SIGNIFICANT",
        "tools/test_compare.py::test_system_score_is_significant_by_randomisation_alone",
    ),
    Mutant(
        "a checkpoint that cannot be opened is taken for damaged",
        "sealed_folder.py",
        "        if lack is not None:\n            raise StorageError",
        "        if False:\n            raise StorageError",
        "core/unit/test_checkpoint.py::test_newest_takes_no_checkpoint_for_damaged_that_it_cannot_open",
    ),
    Mutant(
        "a changed job is not checked again",
        "training/loop.py",
        "    job = checked(TrainJob, job)  # before anything is written\n",
        "",
        "core/unit/test_api.py::test_train_checks_a_job_that_was_changed_again[train.label_smoothing]",
    ),
    Mutant(
        "a foreign name is answered with a key of its group that looks alike",
        "config/keys.py",
        "    close = [last for last, alike in likeness.items() if alike == best >= ALIKE]",
        "    close = [last for last, alike in likeness.items() if alike == best > 0]",
        "scripts/test_foreign.py::test_key_meant_says_nothing_rather_than_what_misleads",
    ),
    Mutant(
        "a bomb of aliases is expanded",
        "config/expansion.py",
        "    if root is not None and _count_values(root, {}) > MOST_VALUES:",
        "    if root is not None and len(root.value) > MOST_VALUES:",
        "core/faults/test_hostile_files.py::test_compose_expands_no_bomb[a list of itself]",
    ),
    Mutant(
        "a corpus of mtdata's keeps the order of its name",
        "integrations/mtdata.py",
        "write(*((second, first) if is_swapped else (first, second)))",
        "write(first, second)",
        "integrations/test_mtdata.py::test_resolve_source_copies_a_corpus_once",
    ),
    Mutant(
        "mtdata ends lines at carriage returns",
        "integrations/mtdata.py",
        'partial(package.open, newline="\\n")',
        "package.open",
        "integrations/test_mtdata.py::test_read_gives_the_pairs_of_any_kind_of_file[Flores-xz-1-deu-eng]",
    ),
    Mutant(
        "an int8 engine that was checked on another kind of processor is used",
        "integrations/engine/make.py",
        "    if saturates:\n        parts.append",
        "    if False:\n        parts.append",
        "integrations/test_engine.py::test_engine_in_int8_is_checked_again_on_a_processor_on_which_it_saturates",
    ),
    Mutant(
        "a link in an archive of mtdata's is followed",
        "integrations/mtdata.py",
        "tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)",
        "pass",
        "integrations/test_mtdata.py::test_read_says_what_is_wrong_in_one_line[Statmt-link-1-deu-eng]",
    ),
    Mutant(
        "the hub's client names files by paths of the hub's",
        "data/hub.py",
        "    _guard_client()\n",
        "",
        "integrations/test_testsets.py::test_test_set_writes_nothing_where_a_header_leads",
    ),
    Mutant(
        "the commit that the hub had the last time is read from a pipe",
        "integrations/published/run.py",
        "open_regular(last_time) as file",
        'last_time.open("rb") as file',
        "integrations/test_push.py::test_run_dir_on_the_hub_waits_for_nothing_in_the_place_of_a_commit",
    ),
    Mutant(
        "a judge outlives what watches it",
        "tools/program_process.py",
        ", preexec_fn=_end_with_parent",
        "",
        "integrations/test_judges.py::test_judge_is_ended_where_it_ends_or_stops_what_watches_it",
    ),
    Mutant(
        "a full disk is not told from another while an output is put together",
        "decoding/bulk.py",
        "raise storage_error(place.output, error=error) from error",
        "raise",
        "core/commands/test_bulk.py::test_translate_names_the_output_that_does_not_fit_on_the_disk",
    ),
    Mutant(
        "a teacher of no sound pair is followed by a training",
        "tools/teach/command.py",
        '["lines"] < 2:',
        '["lines"] < 1:',
        "tools/test_teach.py::test_a_teacher_of_no_sound_pair_ends_before_a_training",
    ),
    Mutant(
        "a pair that the reverse model has no room for ends a teach",
        "tools/teach/command.py",
        "yield pair if max(map(len, ids)) <= most else",
        "yield pair if most else",
        "tools/test_teach.py::test_a_pair_that_the_reverse_model_has_no_room_for_is_left_out",
    ),
    Mutant(
        "augmentation goes by one pair of languages under every tag",
        "tools/augmentation.py",
        "self._languages[tag]",
        "self._languages[None]",
        "tools/test_augment.py::test_augmentation_goes_by_the_languages_of_a_tag",
    ),
    Mutant(
        "rows of a data set that are not UTF-8 are a bug",
        "data/table.py",
        "        except UnicodeDecodeError as error:",
        "        except LookupError as error:",
        "core/unit/test_source.py::test_a_data_set_whose_rows_are_not_utf_8_is_refused",
    ),
    Mutant(
        "Marian's own translations are not compared",
        "integrations/export/command.py",
        "            _refuse_problems(asked.parity, output, run)",
        "            pass",
        "integrations/test_marian_asked.py::test_export_to_marian_is_refused_where_marian_computes_something_else",
    ),
)

MUTANTS = (*REPORTED, *SURVIVORS, *FOUND)


# ---- planting -------------------------------------------------------------------------------------------------------


def plant(mutant: Mutant, tree: Path) -> None:
    """Change the file in a copy of the tree. Raises ValueError, naming the mutant, where its text is not there once."""
    path = tree / "transformer" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: its text is {text.count(mutant.old)} times in {mutant.file}, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, folder / name)
    return folder


def run_tests(tree: Path, tests: Sequence[str]) -> Verdict:
    """Run tests of a copy of the tree in a forked process that has imported nothing of it yet."""
    began = time.monotonic()
    output = tree / "output"
    child = os.fork()
    if child == 0:
        _run_tests_here(tree, tests, output)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return Verdict(status, time.monotonic() - began, text)


def _run_tests_here(tree: Path, tests: Sequence[str], output: Path) -> None:
    """Never returns."""
    status = 70
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "scripts"), ""))]

        import pytest

        options = ["-n", "0", "-q", "-x", "-m", "", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT)]
        status = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    finally:
        sys.stdout.flush()
        os._exit(status)


# ---- the command ----------------------------------------------------------------------------------------------------


def try_all(mutants: Sequence[Mutant], folder: Path) -> Iterator[tuple[Mutant, Verdict]]:
    """Plant each in a copy of its own, and run its test."""
    for number, mutant in enumerate(mutants):
        tree = folder / str(number)
        tree.mkdir()
        copy_tree(tree)
        plant(mutant, tree)
        yield mutant, run_tests(tree, [mutant.test])
        shutil.rmtree(tree)


def main() -> int:
    """Check the clean tree, try the mutants, print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name has one of these in it")
    words = parser.parse_args().words or [""]
    mutants = [mutant for mutant in MUTANTS if any(word in mutant.name for word in words)]

    import torch

    torch.set_num_threads(1)  # a process with more of them must not fork
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in SLOW:
        importlib.import_module(name)

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        clean = folder / "clean"
        clean.mkdir()
        sound = run_tests(copy_tree(clean), sorted({mutant.test for mutant in mutants}))
        if sound.status != SURVIVED:
            print(sound.output)
            print("a named test fails in the tree as it stands")
            return 1

        print("| defect | place | the test that fails | seconds |")
        print("| --- | --- | --- | --- |")
        failures, seconds = [], 0.0
        for mutant, verdict in try_all(mutants, folder):
            seconds += verdict.seconds
            if verdict.status != CAUGHT:
                failures.append(f"{mutant.name}: {mutant.test} ended with {verdict.status}\n{verdict.output[-2000:]}")
            outcome = f"`{mutant.test}`" if verdict.status == CAUGHT else "**none**"
            print(f"| {mutant.name} | {mutant.file} | {outcome} | {verdict.seconds:.1f} |", flush=True)

    caught = len(mutants) - len(failures)
    print(
        f"\n{caught} of {len(mutants)} mutants caught in {seconds:.0f} s; clean, the tests took {sound.seconds:.0f} s"
    )
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
