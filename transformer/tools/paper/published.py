"""What the paper prints: the figures of its Tables 2 and 3 (sections 6.1 and 6.2).

The rows have the names of their experiments in configs/experiment/table3, by which `rows` finds their settings.
"""

from transformer.tools.tables.measured import Published

WIDTH = 512  # of its base model: d_model

# English-German. The rows stand in the paper's order under the names of their experiments.
TABLE_2 = {
    "base": Published(perplexity=None, bleu=27.3, millions=None, flops=3.3e18),
    "big": Published(perplexity=None, bleu=28.4, millions=None, flops=2.3e19),
}
# Perplexity, BLEU, millions of parameters, FLOPs.
TABLE_3 = {
    "base": Published(4.92, 25.8, 65, None),
    "A_h1": Published(5.29, 24.9, None, None),
    "A_h4": Published(5.00, 25.5, None, None),
    "A_h16": Published(4.91, 25.8, None, None),
    "A_h32": Published(5.01, 25.4, None, None),
    "B_dk16": Published(5.16, 25.1, 58, None),
    "B_dk32": Published(5.01, 25.4, 60, None),
    "C_n2": Published(6.11, 23.7, 36, None),
    "C_n4": Published(5.19, 25.3, 50, None),
    "C_n8": Published(4.88, 25.5, 80, None),
    "C_d256": Published(5.75, 24.5, 28, None),
    "C_d1024": Published(4.66, 26.0, 168, None),
    "C_ff1024": Published(5.12, 25.4, 53, None),
    "C_ff4096": Published(4.75, 26.2, 90, None),
    "D_p0": Published(5.77, 24.6, None, None),
    "D_p2": Published(4.95, 25.5, None, None),
    "D_ls0": Published(4.67, 25.3, None, None),
    "D_ls2": Published(5.47, 25.7, None, None),
    "E_learned": Published(4.92, 25.7, None, None),
    "big": Published(4.33, 26.4, 213, None),
}
