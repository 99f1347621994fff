"""How text becomes the batches of training: each line is a stage, with the modules that do it.

text files, tables, data sets         source and shards find them; corpus, table, testset and plug-ins read them
  -> pairs of sentences               screening judges their text: empty, identical, seen before, a detector's find
  -> piece ids                        tokenizer; round_trip counts the texts that do not survive it
  -> a store on disk                  building, into a store; report records what became of the text
                                      prepare, or parts, drives all so far, once for runs that agree on training_text
  -> the pieces of an epoch           epochs; subwords draws other ones for each epoch, under train.subword_sampling
  -> the steps of an epoch            plan: which sentences each optimizer update is made of
  -> the micro-batches of a step      plan: as many as memory needs
  -> tensors and their layout         batch; packing lays sentences end to end
  -> the batches of one rank          loader: prepared ahead by a thread
"""
