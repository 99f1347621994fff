"""How a sentence pair travels from a file to a batch. Each line is a stage and the modules that do it.

corpus     bytes -> lines -> pairs -> the pairs that pass the filters     source, table, corpus
tokenizer  pairs -> a SentencePiece model -> piece ids                    tokenizer
store      ids and offsets on disk, built once for all runs               store; prepare drives all of the above
plan       lengths, seed, epoch -> steps -> micro-batches                 plan
batch      sentence ids -> tensors and their layout, ahead of time        batch, loader
"""
