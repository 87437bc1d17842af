// SPDX-License-Identifier: Apache-2.0
// The subcommands of mesa-trainer, each in a file of its own. argv[0] is the subcommand's name; the result is the exit
// status: 0 done, 1 failed (or outside a tolerance), 2 bad command line or unreadable input.
#ifndef TRAINER_COMMANDS_H
#define TRAINER_COMMANDS_H

enum { TRN_EXIT_OK = 0, TRN_EXIT_FAILED = 1, TRN_EXIT_USAGE = 2 };

#define TRN_COMMANDS(X)                                                           \
    X(tokenizer, "train a byte-level BPE tokenizer from text files")              \
    X(pack, "turn text files into token shards")                                  \
    X(task, "make the data of a synthetic task: recall, copying, hops, sums")     \
    X(train, "train a model, or resume its training")                             \
    X(gate, "train the exit gate of a looped model")                              \
    X(eval, "loss of a checkpoint by position and by solver; scores on tasks")    \
    X(report, "one HTML page that compares runs and results of eval")             \
    X(export, "write a checkpoint as transformers, fla or mamba_ssm reads it")    \
    X(import, "write a checkpoint of theirs in this project's own form")          \
    X(quantize, "write a checkpoint with its matrices in int8 or 4-bit blocks")   \
    X(init, "write an untrained model that can be served")                        \
    X(inspect, "tensors, parameters, state bytes and operations of a checkpoint") \
    X(logits, "logits, loss and gradients for given token ids, as safetensors")   \
    X(check, "compare a checkpoint with expected logits and gradients")           \
    X(bench, "decode, prefill and training speed beside the machine's own limits")

#define TRN_DECLARE_COMMAND(name, summary) int trn_command_##name(int argc, char **argv);
TRN_COMMANDS(TRN_DECLARE_COMMAND)
#undef TRN_DECLARE_COMMAND

#endif
