"""Takes the pictures of the console in docs/ (`make screenshots`), of a fleet of simulated engines
under load; three minutes.

    python -m tests.fleet.api.console_screenshots [--out docs]
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.chromium import PATH, Page, chromium

REPLICAS, PACE, RATE, SEED = 8, 4.0, 5.0, 7
WARM_S = 150.0  # half of the window over which the console counts
TIERS = """
name = "console"
default = "chat"
[tiers.interactive]
slo = {ttft_s = 1.5, tbt_s = 0.12}
share = 0.3
[tiers.chat]
slo = {ttft_s = 3.0, tbt_s = 0.25}
share = 0.4
[tiers.summary]
slo = {ttlt_s = 120.0}
share = 0.2
[tiers.batch]
slo = {ttlt_s = 3600.0}
share = 0.1
"""


async def main(out: Path) -> int:
    if PATH is None:
        print("no Chromium is here: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        tiers = Path(folder) / "tiers.toml"
        tiers.write_text(TIERS)
        spec = FleetSpec(replicas=REPLICAS, pace=PACE, tiers=str(tiers))
        async with Fleet(spec) as fleet:
            access = fleet.access()
            load = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadgen", "load",
                "--url", access.url, "--creds", access.creds, "--tls-ca", access.tls_ca,
                "--workload", "azure-conv", "--tiers", str(tiers), "--rate", str(RATE),
                "--duration", "3600", "--seed", str(SEED),
            )  # fmt: skip
            try:
                await shoot(f"{fleet.http_url}/console", out)
            finally:
                load.terminate()
                await load.wait()
    return 0


async def shoot(url: str, out: Path) -> None:
    async with chromium() as browser:
        page = await browser.page(url)
        await asyncio.sleep(WARM_S)
        await taken(page, out / "console-light.png")
        dark = await browser.page(url, dark=True)
        await asyncio.sleep(15.0)  # its strips fill
        await taken(dark, out / "console-dark.png")
        await open_a_long_life(dark)
        await taken(dark, out / "console-life.png")
        phone = await browser.page(url, width=390, height=844, phone=True)
        await asyncio.sleep(5.0)
        await taken(phone, out / "console-phone.png")


async def open_a_long_life(page: Page) -> None:
    """Open a request whose beginning was heard and that has made some tokens."""
    await page.until(
        "(() => { const found = picture.requests.find(r => r[R.phase] === 'decode' && !r[R.best]"
        "&& r[R.tier] === 'interactive' && r[R.made] > 60 && r[R.made] < 160);"
        "if (found) { select(found[R.key]); open(found[R.key]); } return found; })()"
    )
    await asyncio.sleep(1.5)


async def taken(page: Page, path: Path) -> None:
    await page.screenshot(path)
    assert page.errors == [], page.errors
    print(f"{path}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    raise SystemExit(asyncio.run(main(parser.parse_args().out)))
