"""The three metrics by walking over every cell of the accuracy matrix."""


def metrics(accuracy, domains):
    """TDG, TDA and FA by domain index, from the rows measured so far."""
    before, own, after = {}, {}, {}
    for stage, row in enumerate(accuracy):
        for domain in range(domains):
            if stage < domain:
                before.setdefault(domain, []).append(row[domain])
            elif stage == domain:
                own.setdefault(domain, []).append(row[domain])
            else:
                after.setdefault(domain, []).append(row[domain])
    return {name: {d: sum(v) / len(v) for d, v in cells.items()} for name, cells in _named(before, own, after)}


def _named(before, own, after):
    return ("TDG", before), ("TDA", own), ("FA", after)
