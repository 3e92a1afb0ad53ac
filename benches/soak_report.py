"""What the samples of `soak.py` say: a row for each thing that may not grow, a verdict, a drawing.

Things are compared between the second quarter of the run and its last: the medians, and the median
of the slopes between samples (Theil and Sen), times the samples from the first of these quarters
on. Either may be a tolerance at most, which each row tells. The first quarter is left out, in which
everything is loaded for the first time. Memory is compared between samples for which all of it was
given back; descriptors and the like between all of them.
"""

import json
import statistics

MIB = 1 << 20
#: Fewer samples in a quarter than this say nothing.
LEAST = 3
#: Of a process: by how much it may be more, plainly and as a part of the first median.
OF_PROCESS = {
    "descriptors": (1, 0),
    # Those that read files come and go.
    "threads": (2, 0),
    "maps": (12, 0.02),
    "rss": (6 * MIB, 0.03),
    "anonymous": (6 * MIB, 0.03),
    # The C library takes 64 MiB of addresses for a thread that allocates.
    "addresses": (256 * MIB, 0),
    "locked": (MIB, 0.02),
    "pinned": (MIB, 0.02),
}
#: Of a load, likewise: what its device counts, and a simulated device beside it.
OF_LOAD = {
    # A page may have been fetched ahead; `rows_of` adds four of them.
    "used": (0, 0.02),
    "bars": (0, 0),
    "closing": (0, 0),
    "lingering": (1, 0),
    "quarantined": (0, 0),
    "library_locked": (MIB, 0.02),
    "blocks": (2000, 0.02),
    "tensor_bytes": (MIB, 0.02),
    "reservations": (1, 0),
    "reserved": (0, 0.01),
    "mappings": (4, 0.02),
    # As many as were in use at a time, ever: a late stream takes more.
    "events": (128, 0.5),
    "streams": (1, 0),
}
#: Those that are the same whatever is resident: of every sample.
ALWAYS = {"descriptors", "threads", "bars", "streams", "reservations"}
#: What the driver misses beyond what is counted may grow by this, where other programs' memory is
#: in it too; and what passes may take longer.
UNCOUNTED = (32 * MIB, 0.0)
SECONDS = (0.002, 0.25)


def read(path):
    """The options, the samples and the end of a run; the last line may be cut off."""
    options, samples, end = None, [], None
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                told = json.loads(line)
            except ValueError:
                break
            options = told.get("soak", options)
            end = told.get("end", end)
            if "sample" in told:
                samples.append(told["sample"])
    return options or {}, samples, end


def slope(points):
    """The median of the slopes between points: one in four of them may be anywhere."""
    slopes = [
        (later - early) / (end - begin)
        for at, (begin, early) in enumerate(points)
        for end, later in points[at + 1 :]
        if end > begin
    ]
    return statistics.median(slopes) if slopes else 0.0


def thinned(points, most=300):
    """At most so many of them, evenly: of pairs there are many more."""
    step = max(1, len(points) // most)
    return points[::step]


def compare(name, values, tolerance):
    """A row: whether what was sampled grew. None where there is too little."""
    count = len(values)
    second, last = values[count // 4 : count // 2], values[3 * count // 4 :]
    if min(len(second), len(last)) < LEAST:
        return None
    first, end = statistics.median(second), statistics.median(last)
    used = thinned(list(enumerate(values))[count // 4 :])
    trend = slope(used) * (used[-1][0] - used[0][0])
    allowed = max(tolerance[0], tolerance[1] * abs(first))
    return {
        "what": name,
        "second_quarter": first,
        "last_quarter": end,
        "change": end - first,
        "trend": trend,
        "allowed": allowed,
        "samples": count,
        "fine": end - first <= allowed and trend <= allowed,
    }


def uncounted(sample):
    """What is held of the device beyond what is counted: by the driver's word, or the simulated
    device's, a number each.
    """
    found, loads = {}, sample["loads"]
    for name, told in loads.items():
        if "live_bytes" in told and name != "thread":
            found[f"{name}: frames alive, not counted"] = told["live_bytes"] - told["used"]
    neighbour = loads.get("neighbour")
    if neighbour:
        # A thread's device is its process's.
        counted = neighbour["taken"] + sum(
            told["used"] for name, told in loads.items() if "used" in told and name != "thread"
        )
        found["device: in use, not counted"] = neighbour["total"] - neighbour["free"] - counted
        if neighbour.get("nvml"):
            found["device: in use by NVML, not counted"] = neighbour["nvml"] - counted
    return found


def rows_of(options, samples):
    """Everything that may not grow."""
    rows, missing = [], []
    bare = [sample for sample in samples if sample["bare"]]

    def add(name, from_samples, number, tolerance):
        values = [number(one) for one in from_samples if number(one) is not None]
        if not values:
            return
        row = compare(name, values, tolerance)
        (missing if row is None else rows).append(row or name)

    processes = list(samples[0]["processes"]) if samples else []
    loads = list(samples[0]["loads"]) if samples else []
    for name in processes:
        for what, tolerance in OF_PROCESS.items():
            chosen = samples if what in ALWAYS else bare
            add(f"{name}: {what}", chosen,
                lambda one: one["processes"][name].get(what), tolerance)
    for name in loads:
        for what, tolerance in OF_LOAD.items():
            chosen = samples if what in ALWAYS else bare
            if what == "used":
                tolerance = (4 * options.get("page", 0), tolerance[1])
            add(f"{name}: {what}", chosen, lambda one: one["loads"][name].get(what), tolerance)
    for what in uncounted(samples[0]) if samples else ():
        # A simulated device counts frames and nothing else.
        tolerance = UNCOUNTED if what.startswith("device") else (0, 0)
        add(what, samples, lambda one: uncounted(one).get(what), tolerance)
    for name in loads:
        add(f"{name}: seconds of a pass", bare,
            lambda one: one.get("seconds", {}).get(name), SECONDS)
    return rows, missing


def quarters_without_progress(samples):
    """Loads that verified nothing in a quarter of the run."""
    found, count = [], len(samples)
    for name, last in samples[-1]["loads"].items():
        if "used" not in last:
            continue
        for quarter in range(4):
            part = samples[quarter * count // 4 : (quarter + 1) * count // 4]
            at = [one["loads"][name]["verified"] for one in part]
            # One round may be interrupted before it has verified anything.
            if len(at) > LEAST and at[-1] == at[0]:
                found.append(f"{name} verified nothing in quarter {quarter + 1}")
    return found


def found_wrong(options, samples, end):
    """Sentences, of what is wrong whenever it happens."""
    found = []
    if end is not None and end.get("failed"):
        found.append(end["failed"])
    if end is not None:
        found += [f"{name} ended with {code}"
                  for name, code in end.get("codes", {}).items() if code]
    if not samples:
        return found
    for name, told in samples[-1]["loads"].items():
        if told.get("wrong"):
            found.append(f"{name}: {told['wrong']} times wrong bytes, first {told['first_wrong']}")
        if told.get("violations"):
            first = told.get("first_violation", "")
            found.append(f"{name}: {told['violations']} breaches of CUDA's contract {first}")
    for sample in samples:
        # A simulated device knows each frame: not one may be apart.
        for what, apart in uncounted(sample).items():
            if not what.startswith("device") and apart:
                found.append(f"{what}: {apart} bytes at {sample['at']} s")
        for name, told in sample["loads"].items():
            # Each sets its own now and then, to 10/8 at most; behind a lower one what is in use stays
            # until that is over.
            most = options.get("c_budget" if name == "c" else "budget", 0) * 10 // 8
            if most and told.get("used", 0) > most:
                found.append(f"{name}: {told['used']} bytes held of {most} at {sample['at']} s")
    return found[:20] + quarters_without_progress(samples)


def verdict(path):
    """Everything that is to be said of a run."""
    options, samples, end = read(path)
    rows, missing = rows_of(options, samples)
    wrong = found_wrong(options, samples, end)
    grown = [row["what"] for row in rows if not row["fine"]]
    loads = samples[-1]["loads"] if samples else {}
    complete = end is not None and not end.get("failed")
    # Before the end something may still be made for the first time.
    if wrong or (grown and complete):
        code = 1
    elif not complete or missing or not rows:
        code = 3
    else:
        code = 0
    return {
        "code": code,
        "complete": complete,
        "ended": end is not None,
        "seconds": samples[-1]["at"] if samples else 0,
        "seconds_wanted": None if options.get("samples") else options.get("seconds"),
        "samples": len(samples),
        "wrong": wrong,
        "grown": grown,
        "too_few_samples": missing,
        "rows": rows,
        "loads": {
            name: {key: told.get(key) for key in
                   ("rounds", "passes", "verified", "wrong", "refused", "interrupted", "evicted",
                    "filled", "reasons") if key in told}
            for name, told in loads.items()
        },
        "options": options,
    }


def number_text(name, value):
    """As people read it."""
    if name.endswith("seconds of a pass"):
        return f"{value * 1e3:.2f} ms"
    plain = ("descriptors", "threads", "maps", "bars", "closing", "lingering", "blocks",
             "reservations", "mappings", "events", "streams")
    return f"{value:.0f}" if name.endswith(plain) else f"{value / MIB:.2f} MiB"


def table(told):
    """The verdict as text."""
    lines = []
    for name, load in told["loads"].items():
        verified = load.get("verified", 0)
        reasons = ", ".join(f"{count} {name}" for name, count in load.get("reasons", {}).items())
        lines.append(
            f"{name}: {load.get('rounds')} rounds, {load.get('passes')} passes,"
            f" {verified / 1e9:.2f} GB verified, {load.get('wrong')} times wrong,"
            f" {load.get('refused')} refused ({reasons}), {load.get('interrupted')} interrupted,"
            f" {load.get('evicted', 0)} pages evicted"
        )
    lines.append(f"{'':42} {'2nd quarter':>14} {'last quarter':>14} {'trend':>12} {'allowed':>12}")
    for row in told["rows"]:
        texts = [number_text(row["what"], row[key])
                 for key in ("second_quarter", "last_quarter", "trend", "allowed")]
        lines.append(f"{row['what']:42} {texts[0]:>14} {texts[1]:>14} {texts[2]:>12}"
                     f" {texts[3]:>12}{'' if row['fine'] else '  GROWS'}")
    lines += [f"WRONG: {text}" for text in told["wrong"]]
    lines += [f"too few samples: {name}" for name in told["too_few_samples"]]
    wanted = f" of {told['seconds_wanted']:.0f}" if told["seconds_wanted"] else ""
    state = "" if told["complete"] else ", it ended too early" if told["ended"] else ", no end yet"
    words = {0: "all is well", 1: "NOT WELL", 3: "not enough to say"}
    lines.append(f"{told['seconds']:.0f}{wanted} s, {told['samples']} samples"
                 f"{state}: {words[told['code']]}")
    return "\n".join(lines)


def plot(path):
    """Small drawings of what was sampled, over time, as SVG: a line a process or load."""
    _, samples, _ = read(path)
    width, height, colours = 330, 130, ["#1b6ca8", "#c8553d", "#588157", "#8e44ad"]
    bare = [sample for sample in samples if sample["bare"]]

    def of_loads(what, chosen, scale):
        names = chosen[0]["loads"] if chosen else ()
        return {name: [(one["at"], one["loads"][name][what] * scale) for one in chosen
                       if what in one["loads"][name]] for name in names}

    def of_processes(what, chosen, scale):
        names = chosen[0]["processes"] if chosen else ()
        return {name: [(one["at"], one["processes"][name][what] * scale) for one in chosen]
                for name in names}

    outside = {}
    for sample in samples:
        for name, value in uncounted(sample).items():
            outside.setdefault(name, []).append((sample["at"], value / MIB))
    drawings = [
        ("frames that are counted, MiB", of_loads("used", samples, 1 / MIB)),
        ("held and not counted, MiB", outside),
        ("resident memory of the process, MiB", of_processes("rss", bare, 1 / MIB)),
        ("descriptors", of_processes("descriptors", samples, 1)),
        ("mappings of the process", of_processes("maps", bare, 1)),
        ("verified, GB", of_loads("verified", samples, 1e-9)),
        ("a pass, ms", {name: [(one["at"], one["seconds"][name] * 1e3) for one in bare]
                        for name in (bare[0].get("seconds", ()) if bare else ())}),
    ]
    rows = -(-len(drawings) // 2)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width + 20}"'
        f' height="{rows * (height + 50)}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    end = max((sample["at"] for sample in samples), default=1) or 1
    for number, (title, lines) in enumerate(drawings):
        left, top = 50 + number % 2 * width, 30 + number // 2 * (height + 50)
        right, bottom = left + width - 70, top + height
        values = [value for points in lines.values() for _, value in points] or [0]
        least, most = min(0, *values), max(values) * 1.05 or 1
        out.append(f'<text x="{left}" y="{top - 8}">{title}</text>')
        out.append(f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>')
        out.append(f'<text x="{left - 4}" y="{top + 8}" text-anchor="end">{most:.4g}</text>')
        out.append(f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{end:.0f} s</text>')
        for place, (name, points) in enumerate(one for one in lines.items() if one[1]):
            colour = colours[place % len(colours)]
            drawn = " ".join(
                f"{left + (right - left) * at / end:.1f},"
                f"{bottom - (bottom - top) * (value - least) / (most - least):.1f}"
                for at, value in thinned(points, 400)
            )
            out.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}"/>')
            out.append(f'<text x="{left + 4 + 80 * place}" y="{bottom + 14}" fill="{colour}">'
                       f"{name.split(':')[0]}</text>")
    return "\n".join([*out, "</svg>"]) + "\n"


def report(path, json_path=None, svg_path=None):
    """Prints the verdict, and writes it where it is wanted; the exit code."""
    told = verdict(path)
    print(table(told), flush=True)
    if json_path:
        json_path.write_text(json.dumps(told, indent=1))
    if svg_path:
        svg_path.write_text(plot(path))
    return told["code"]
