"""Qiao beside llama.cpp, OpenVINO GenAI, vLLM and transformers, on this machine's CPU, in one run.

    python benchmarks/peers.py setup      # environments and models, once: about 16 GB and an hour
    python benchmarks/peers.py run        # an hour or two on an idle machine; --quick sees whether all start
    python benchmarks/peers.py report     # table and plots again from results/peers.json; --readme fills the READMEs

How it is measured: benchmarks/README.md.
"""

from comparison.commands import main

if __name__ == "__main__":
    main()
