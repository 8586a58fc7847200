"""Treat saved programs roughly, in children of a process that has read a good one.

    python -m tests.whole_step.saving.rough FILE mutants COUNT SEED
    python -m tests.whole_step.saving.rough FILE kills COUNT SEED

Prints how often what came of it, one kind a line, and ends with 1 if something came that must not.
"""

import copy
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from ipu_dynamo import SavedProgramError, load, save
from ipu_dynamo.saved.archive import Archive, write_archive

SECONDS, NBYTES = 2, 1 << 30  # of a child, beside what its parent has
ODD = (-1, 0, 10**30, 2**31, "x", None, True, [], {}, [[]], 1.5, "../../x", "nan", "0" * 999)


class Canary:
    """Runs when it is unpickled: it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """JSON with one value exchanged, or one field more or less."""
    value = json.loads(content)
    places = []

    def walk(at):
        for key in at if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], dict | list):
                walk(at[key])

    walk(value)
    if places:
        at, key = rng.choice(places)
        if rng.random() < 0.2:
            del at[key]
        else:
            at[key] = copy.deepcopy(rng.choice((*ODD, rng.choice(places)[0])))
    try:
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    except ValueError:  # it holds itself
        return b"[" * 100_000


def changed_text(content: bytes, rng: random.Random) -> bytes:
    """A program's text with a line, a word or a number exchanged."""
    lines = content.split(b"\n")
    index = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[index]
        case 1:
            lines.insert(index, rng.choice(lines))
        case 2:
            words = lines[index].split(b" ")
            words[rng.randrange(len(words))] = rng.choice(rng.choice(lines).split(b" "))
            lines[index] = b" ".join(words)
        case 3:
            digits = [i for i, byte in enumerate(lines[index]) if 48 <= byte < 58]
            if digits:
                place = rng.choice(digits)
                number = rng.choice([b"9", b"0", b"99999999", b"-1"])
                lines[index] = lines[index][:place] + number + lines[index][place + 1 :]
    return b"\n".join(lines)


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 8])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def mutate(good: Path, bad: Path, rng: random.Random, canary: Path) -> bool:
    """Write a changed file; return whether its sums were computed anew."""
    whole = good.read_bytes()
    payload = pickle.dumps(Canary(str(canary)))
    if rng.random() < 0.5:  # changed as bytes, with the sums as they were
        match rng.randrange(4):
            case 0 | 1:
                bad.write_bytes(flipped(whole, rng))
            case 2:
                bad.write_bytes(whole[: rng.randrange(len(whole))])
            case 3:
                begin = rng.randrange(len(whole))
                bad.write_bytes(whole[:begin] + payload + whole[begin + len(payload) :])
        return False
    with Archive(good) as archive:
        members = {name: archive.read(name, 1 << 30) for name in archive.names}
        head = dict(archive.head)
    name = rng.choice(list(members))
    match rng.randrange(7):
        case 0:
            members[name] = flipped(members[name], rng)
        case 1:
            members[name] = members[name][: rng.randrange(len(members[name]))]
        case 2:
            other = rng.choice(list(members))
            members[name], members[other] = members[other], members[name]
        case 3:
            members[name if rng.random() < 0.5 else "data.pkl"] = payload
        case 4:
            head[rng.choice([*head, "more"])] = rng.choice(["9.9.9", None, 7, [], "core "])
        case 5 | 6:
            name = rng.choice([n for n in members if not n.endswith("safetensors")])
            change = changed_json if name.endswith("json") else changed_text
            members[name] = change(members[name], rng)
    write_archive(bad, members, head)
    return True


def outcome(path: Path, batch, expected) -> str:
    """What comes of a file: refused, equal, or other results."""
    try:
        run = load(path)
    except SavedProgramError as error:
        return "refused" if str(error).startswith(str(path)) else f"does not name the file: {error}"
    try:
        found = run(*batch)
    except Exception as error:
        return "other" if type(error).__module__.startswith("ipu_dynamo") else repr(error)
    same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    return "equal" if same else "other"


def in_child(action) -> str:
    """What `action` returns in a child with bounds, or how the child ended."""
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + NBYTES, used + NBYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            os.write(end, action().encode())
        except BaseException:
            os.write(end, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(end)
    with os.fdopen(begin, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return text or f"ended with {status}"


def mutants(good: Path, count: int, seed: int) -> Counter[str]:
    batch = torch.load(good.with_suffix(".batch"), weights_only=True)
    expected = load(good)(*batch)
    bad, canary = good.with_suffix(".bad"), good.with_suffix(".canary")
    found: Counter[str] = Counter()
    for number in range(count):
        anew = mutate(good, bad, random.Random(f"{seed} {number}"), canary)
        result = in_child(lambda: outcome(bad, batch, expected))
        if canary.exists():
            result = "canary"
        if result not in ("refused", "equal") and not (anew and result == "other"):
            print(f"mutant {number} of seed {seed}: {result}")
            result = "FAULT"
        found[f"{result}{' (sums anew)' if anew else ''}"] += 1
    return found


def kills(good: Path, count: int, seed: int) -> Counter[str]:
    """Kill children that save at random times; the old or the new file has to load."""
    batch = torch.load(good.with_suffix(".batch"), weights_only=True)
    run = load(good)
    old, new = load(good), load(good)
    results = {"old": old(*batch), "new": (new(*batch), new(*batch))[1]}
    saved = {"old": load(good), "new": load(good)}
    saved["new"](*batch)
    target, rng = good.with_suffix(".killed"), random.Random(seed)
    found: Counter[str] = Counter()

    def child_that_saves() -> int:
        save(saved["old"], target)
        child = os.fork()
        if child == 0:
            save(saved["new"], target)
            os._exit(0)
        return child

    seconds = max(map(_seconds_of, (child_that_saves() for _ in range(3))))
    for _ in range(count):
        child = child_that_saves()
        time.sleep(rng.random() * 1.2 * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        returned = load(target)(*batch)
        kinds = [k for k, r in results.items() if all(map(torch.equal, r, returned))]
        found[kinds[0] if kinds else "FAULT"] += 1
    save(run, target)
    left = [name for name in os.listdir(good.parent) if "unfinished" in name]
    if left:
        found[f"FAULT: {left}"] += 1
    return found


def _seconds_of(child: int) -> float:
    """How long a child runs that has just begun."""
    started = time.perf_counter()
    os.waitpid(child, 0)
    return time.perf_counter() - started


def main() -> None:
    torch.set_num_threads(1)
    good, kind, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    found = {"mutants": mutants, "kills": kills}[kind](good, count, seed)
    for name, number in sorted(found.items()):
        print(f"{number} {name}")
    sys.exit(any("FAULT" in name for name in found))


if __name__ == "__main__":
    main()
