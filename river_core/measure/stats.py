"""Intervals over prompts. Tokens of one answer depend on one another, so the unit that is drawn again is the prompt, with all of its tokens."""

import warnings

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap

DRAWS = 9999
LEVEL = 0.95
FEWEST = 5  # prompts; of fewer a bootstrap says little more than that they are few
SEED = 0


def interval(sums, counts, *, other=None, draws: int = DRAWS, level: float = LEVEL, seed: int = SEED) -> dict:
    """A mean over tokens, or the difference of two, with its interval over prompts.

    BCa bootstrap (Efron 1987), as `scipy.stats.bootstrap` has it.

    Args:
        sums, counts: one number a prompt: what is averaged, summed over the prompt's tokens, and how many tokens those are. Prompts with a count of 0 are left out.
        other: sums of another method over the same tokens of the same prompts; then the figure is the difference, sums - other, paired by prompt.
        draws, level, seed: of the bootstrap.

    Returns:
        dict, JSON-ready: value (None without a token), low, high (both None where there are fewer than `FEWEST` prompts), n: prompts; of a difference also within_noise:
        whether the interval holds zero, None if there is no interval.
    """
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    against = np.zeros_like(sums) if other is None else np.asarray(other, float)
    kept = counts > 0
    sums, counts = (sums - against)[kept], counts[kept]
    n = len(sums)
    value = float(sums.sum() / counts.sum()) if n else None
    low = high = None
    if n >= FEWEST:
        if np.ptp(sums / counts) == 0:
            low = high = value  # every prompt says the same
        else:
            low, high = _bca((sums, counts), lambda s, c, axis=-1: s.sum(axis) / c.sum(axis), draws, level, seed)
    found = {"value": value, "low": low, "high": high, "n": n}
    return found if other is None else found | {"within_noise": None if low is None else low <= 0 <= high}


def interval_of(values, statistic, *, draws: int = DRAWS, level: float = LEVEL, seed: int = SEED) -> dict:
    """Any statistic of one number a prompt, such as a median of ratios, with its interval over prompts.

    Args:
        values: one number a prompt. statistic: callable (array, axis) -> array, such as `numpy.median`.

    Returns:
        as `interval`.
    """
    values = np.asarray(values, float)
    low = high = None
    if len(values) >= FEWEST:
        low = high = float(values[0])
        if np.ptp(values) > 0:
            low, high = _bca((values,), statistic, draws, level, seed)
    return {"value": float(statistic(values, axis=-1)) if len(values) else None, "low": low, "high": high, "n": len(values)}


def correlation(pairs, *, draws: int = DRAWS, level: float = LEVEL, seed: int = SEED) -> dict:
    """Pearson's r over all tokens, with its interval over prompts.

    Args:
        pairs: one [tokens, 2] array a prompt.

    Returns:
        as `interval`; value None where r is not defined.
    """
    pairs = [np.asarray(one, float).reshape(-1, 2) for one in pairs if len(one)]
    # r needs sums only: n, x, y, xx, yy, xy of a prompt.
    parts = np.array([[len(p), *p.sum(0), *(p**2).sum(0), (p[:, 0] * p[:, 1]).sum()] for p in pairs]).reshape(-1, 6)

    def r(*sums, axis=-1):
        n, x, y, xx, yy, xy = (one.sum(axis) for one in sums)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (xy - x * y / n) / np.sqrt(np.maximum(xx - x * x / n, 0) * np.maximum(yy - y * y / n, 0))

    value = float(r(*parts.T)) if len(parts) else np.nan
    low = high = None
    if np.isfinite(value) and len(parts) >= FEWEST:
        low, high = _bca(tuple(parts.T), r, draws, level, seed)
    return {"value": value if np.isfinite(value) else None, "low": low, "high": high, "n": len(parts)}


def _bca(samples, statistic, draws, level, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)
        found = bootstrap(
            samples,
            statistic,
            paired=len(samples) > 1,
            vectorized=True,
            n_resamples=draws,
            batch=1000,
            confidence_level=level,
            rng=np.random.default_rng(seed),
        )
        low, high = found.confidence_interval
        if not (np.isfinite(low) and np.isfinite(high)):
            # The correction is not defined where leaving out any one prompt changes nothing; the plain percentiles are.
            low, high = np.nanpercentile(found.bootstrap_distribution, [50 * (1 - level), 50 * (1 + level)])
    return (float(low), float(high)) if np.isfinite(low) and np.isfinite(high) else (None, None)


def in_words(found: dict, digits: int = 3, signed: bool = False) -> str:
    """A figure with its interval, for a table: "0.874 (0.851 - 0.896)"; the figure alone where there is no interval."""
    sign = "+" if signed else ""
    if found["value"] is None:
        return "-"
    text = f"{found['value']:{sign}.{digits}f}"
    if found["low"] is None:
        return text
    joint = " to " if signed else " - "
    return f"{text} ({found['low']:{sign}.{digits}f}{joint}{found['high']:{sign}.{digits}f})"


def verdict(difference: dict) -> str:
    """What a paired difference allows to be said: "within noise", "beyond noise", or that there are too few prompts to tell."""
    if difference["within_noise"] is None:
        return f"too few prompts to tell (fewer than {FEWEST})"
    return "within noise" if difference["within_noise"] else "beyond noise"
