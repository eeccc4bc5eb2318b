"""Generation over a long document by chosen pages of a cache, beside attention to all of it.

A small transformer learns bytes of the guide and the sources. Then it reads long documents that end
in the first bytes of a passage from their midst, and goes on, with attention to

    all      the whole cache: `attention_decode`
    means    pages whose mean key suits the query: `summarize_pages`, `choose_pages`
    bounds   pages whose minimum and maximum allow the largest scores: the same two
    scores   pages with the largest scores: `block_scores`, `top_k`, `index_attention`

The last one reads every key to choose, so it tells how good a choice can be; a model with an index
of its own has smaller keys for that. Printed are, for shares of the pages:

    weight       how much of the weight of dense attention the chosen pages hold
    same token   the likeliest token is that of dense attention, where both follow the passage
    error        of the logits, relative to those of dense attention, there as well
    foretold     the likeliest token is that of the passage
    same text    generated tokens that are those of dense attention, each behind its own ones

    python long_document_generation.py --small                         # a few seconds
    python long_document_generation.py                                 # half a minute without a GPU
    python long_document_generation.py --device cuda --tokens 131072   # CUDA graphs and events
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import byte_model
import plot
import torch
from byte_model import SEEN, Model, Sizes
from torch import Tensor

from blockflash import (
    append_kv,
    attention_decode,
    block_scores,
    choose_pages,
    index_attention,
    summarize_pages,
    top_k,
)

ALL, MEANS, BOUNDS, SCORES = "all", "means", "bounds", "scores"
STATISTICS = {MEANS: 1, BOUNDS: 2}
LEAD = 16
"""Bytes of the passage that the prompt ends in."""
CHUNK = 4096
"""Tokens of each prompt that are read at a time."""


class Cache:
    """The keys and values of a layer in pages, and the attention of the layer to them."""

    def __init__(self, sizes: Sizes, page: int, options: dict[str, Tensor], like: Tensor) -> None:
        self.options, self.page = options, page
        pages, heads = options["block_table"].numel(), sizes.heads_k
        self.k, self.v = like.new_zeros(2, pages, page, heads, sizes.head_dim)
        self.summaries = {
            way: like.new_zeros(pages, count, heads, sizes.head_dim)
            for way, count in STATISTICS.items()
        }
        self.way, self.room = ALL, 0
        self.kept: list[Tensor] | None = None
        """Shares of the weight of dense attention, if they are asked for."""

    def summarize(self, way: str, tokens: int | None = None) -> None:
        """Writes the summaries of pages, or only of those that hold the last tokens."""
        summarize_pages(self.k, self.summaries[way], tokens=tokens, **self.options)

    def __call__(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the keys and values of new tokens, and attends."""
        given: dict[str, Any] = {"causal": True, "return_lse": True, **self.options}
        if self.way == SCORES:
            o, lse = self.by_scores(q, k, v, given)
        elif self.way == ALL:
            return attention_decode(q, self.k, self.v, k=k, v=v, **given)[0]
        else:
            # The page of the new token is the last one, which is chosen whatever its summary is.
            summaries = self.summaries[self.way]
            pages = choose_pages(q, self.k, summaries, room=self.room, **self.options)
            o, lse = attention_decode(q, self.k, self.v, k=k, v=v, pages=pages, **given)
            self.summarize(self.way, tokens=1)
        if self.kept is not None:
            _, lse_of_all = attention_decode(q, self.k, self.v, **given)
            self.kept.append((lse - lse_of_all).exp().mean())
        return o

    def by_scores(
        self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attention to the pages with the largest scores of one of their keys."""
        append_kv(k, v, self.k, self.v, **self.options)
        lengths = {"seqused_k": self.options["seqused_k"], "causal": True}
        scores = block_scores(q, self.k, self.page, causal=True, **self.options)
        lists = top_k(scores, self.room, self.page, first=1, last=1, **lengths)
        return index_attention(q, self.k, self.v, lists, self.page, **given)


class Generation:
    """Documents that a model has read, to be continued again and again."""

    def __init__(self, model: Model, prompt: Tensor, new: int, page: int) -> None:
        self.model, self.prompt, self.new = model, prompt, new
        rows, tokens = prompt.shape
        like, columns = model.head.weight, -(-(tokens + new) // page)
        table = torch.randperm(rows * columns).int().view(rows, columns).to(prompt.device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=prompt.device)
        options = {"block_table": table, "seqused_k": self.lengths}
        self.caches = [Cache(model.sizes, page, options, like) for _ in model.layers]
        for layer, cache in zip(model.layers, self.caches):
            layer.attend = cache
        self.last = prompt[:, -SEEN:].clone()
        self.found = prompt.new_zeros(rows, new)
        # The last token of the prompt is left for the first step.
        for start in range(0, tokens - 1, CHUNK):
            end = min(start + CHUNK, tokens - 1)
            self.lengths.fill_(end)
            model(prompt[:, max(0, start - SEEN + 1) : end], last=end - start)
        for cache in self.caches:
            for way in STATISTICS:
                cache.summarize(way)

    def attend(self, way: str, room: int) -> None:
        """Has all steps from here on attend in this way, to as many pages."""
        for cache in self.caches:
            cache.way, cache.room = way, room

    def restart(self) -> None:
        """Goes back to the end of the prompt; what the caches hold behind it does not matter."""
        self.lengths.fill_(self.prompt.shape[1] - 1)
        self.last.copy_(self.prompt[:, -SEEN:])

    def step(self) -> None:
        """Generates a token of each document."""
        at = self.lengths[:1].long() + (1 - self.prompt.shape[1])
        self.lengths.add_(1)
        token = self.model(self.last, last=1)[:, 0].argmax(-1, keepdim=True)
        self.found.index_copy_(1, at, token)
        self.last.copy_(torch.cat([self.last[:, 1:], token], 1))

    def generate(self) -> tuple[Tensor, float]:
        """The new tokens, and milliseconds for one of each document."""
        run = self.step
        self.restart()
        if self.prompt.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            run = graph.replay
        else:
            self.step()  # What a first call does once is not what a token costs.
        self.restart()
        if self.prompt.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(self.new):
                run()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            for _ in range(self.new):
                run()
            elapsed = (time.perf_counter() - start) * 1e3
        return self.found.clone(), elapsed / self.new

    def follow(self, text: Tensor) -> tuple[Tensor, float]:
        """Logits in float32 of the tokens of a given text, and the share of the weight."""
        self.restart()
        for cache in self.caches:
            cache.kept = []
        text, logits = torch.cat([self.prompt[:, -SEEN:], text], 1), []
        for at in range(self.new):
            self.lengths.add_(1)
            logits.append(self.model(text[:, at : at + SEEN], last=1).float())
        kept = [share for cache in self.caches for share in cache.kept or []]
        for cache in self.caches:
            cache.kept = None
        return torch.cat(logits, 1), torch.stack(kept).mean().item() if kept else 1.0


def documents(text: Tensor, rows: int, tokens: int, new: int) -> tuple[Tensor, Tensor]:
    """Prompts that end in the first bytes of a passage from their midst, and what follows there."""
    starts = torch.randint(max(1, len(text) - tokens), (rows,)).tolist()
    places = torch.arange(tokens, device=text.device)
    prompts = torch.stack([text[(at + places) % len(text)] for at in starts]).long()
    passages = torch.randint(tokens // 8, tokens * 7 // 8 - LEAD - new, (rows, 1))
    passages = (passages + torch.arange(LEAD + new)).to(text.device)
    lead, follows = prompts.gather(1, passages).split([LEAD, new], 1)
    return torch.cat([prompts[:, :-LEAD], lead], 1), follows


def main() -> None:
    """Trains, generates and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    byte_model.add_arguments(parser, "long_document_generation.svg")
    parser.add_argument("--tokens", type=int, default=None, help="of a document")
    parser.add_argument("--rows", type=int, default=8, help="documents")
    parser.add_argument("--new", type=int, default=None, help="tokens to generate for each")
    parser.add_argument("--page", type=int, default=None, help="tokens of a page")
    parser.add_argument("--shares", type=float, nargs="+", default=[1 / 16, 1 / 8, 1 / 4])
    arguments = parser.parse_args()
    sizes = byte_model.sizes_of(arguments)
    on_gpu = arguments.device != "cpu"
    page = arguments.page or (64 if on_gpu else 16)
    tokens = arguments.tokens or (512 if arguments.small else 65_536 if on_gpu else 2048)
    new = arguments.new or (16 if arguments.small else 32)
    if tokens * 3 // 4 <= LEAD + new:
        parser.error(f"--tokens is {tokens}, too few for --new {new}")

    text = byte_model.read_text(arguments.text, arguments.device)
    torch.manual_seed(0)
    model = Model(sizes).to(arguments.device)
    course = byte_model.train(model, text, sizes.steps)
    print(
        f"{len(text)} bytes of text, {arguments.device}, learned in {sizes.steps} steps to a loss "
        f"of {course.plain[-1]:.2f}, and of {course.quoted[-1]:.2f} in quotations, then:"
    )
    model = model.bfloat16() if on_gpu else model
    prompt, follows = documents(text, arguments.rows, tokens, new)
    with torch.inference_mode():
        compare(Generation(model, prompt, new, page), follows, arguments)


def compare(generation: Generation, follows: Tensor, arguments: argparse.Namespace) -> None:
    """Prints how the ways differ at each share of the pages, and plots it."""
    rows, tokens = generation.prompt.shape
    pages = generation.caches[0].options["block_table"].shape[1]
    print(f"{rows} documents of {tokens} tokens, {pages} pages of {generation.caches[0].page}")
    print(
        f"{'attends to':>10} {'pages':>6} {'share':>6} {'weight':>7} {'same token':>11} "
        f"{'error':>6} {'foretold':>9} {'same text':>10} {'ms/token':>9}"
    )
    dense, elapsed = generation.generate()
    expected, _ = generation.follow(follows)

    def report(way: str, room: int, found: Tensor, elapsed: float) -> float:
        logits, kept = generation.follow(follows)
        tokens = logits.argmax(-1)
        same, foretold, alike = (
            (a == b).float().mean().item()
            for a, b in ((tokens, expected.argmax(-1)), (tokens, follows), (found, dense))
        )
        error = ((logits - expected).norm() / expected.norm()).item()
        print(
            f"{way:>10} {room:6} {room / pages:6.1%} {kept:7.1%} {same:11.1%} {error:6.3f} "
            f"{foretold:9.1%} {alike:10.1%} {elapsed:9.3f}"
        )
        return same

    report(ALL, pages, dense, elapsed)
    of_dense = elapsed
    percent = [100 * share for share in arguments.shares]
    alike: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for way in (MEANS, BOUNDS, SCORES):
        same, taken = [], []
        for share in arguments.shares:
            room = min(pages, max(2, round(pages * share)))
            generation.attend(way, room)
            found, elapsed = generation.generate()
            same.append(100 * report(way, room, found, elapsed))
            taken.append(elapsed)
        alike[way], times[way] = (percent, same), (percent, taken)
    times[ALL] = (0, max(percent)), (of_dense, of_dense)
    charts = [
        plot.Chart("same token as dense attention, %", "% of the pages", alike),
        plot.Chart(f"ms for a token of {rows} documents", "% of the pages", times),
    ]
    plot.write(arguments.plot, charts)
    print(f"The plot is in {arguments.plot}.")


if __name__ == "__main__":
    main()
