"""Runs the pods of rendered objects as processes of this machine, as a cluster would.

Each pod has a loopback address of its own, so that ports are those of the objects, and a folder in
which its volumes are mounted. In commands, variables and files these stand for the container's own:

    /keys, /config, ...                           the folder of the volume
    slackline-nats-0.slackline-nats.serving.svc   the address of that pod
    0.0.0.0                                       the pod's own address

A pod starts when all that it mounts is there. A container that ends is started again. What no
process on loopback can show: images, limits, network policies, users and read-only roots.
"""

import asyncio
import contextlib
import re
import secrets as random
import sys
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any, Self

import httpx

from loadgen.fleet.child import Child
from loadgen.fleet.lifeline import bound
from loadgen.fleet.nats_server import find_binary
from tests.infra.helm.api_server import TOKENS, Secrets, api_server
from tests.infra.helm.chart import NAMESPACE, ROOT, Object, named

POLL_S = 0.1
LAG_S = 2.0  # until proxies have heard that a pod leaves
PERIOD_S, FAILURES = 5.0, 3  # of readiness probes; the chart states the first
HEALTH = "/opt/slackline/health.py"  # in the image
VARIABLE = re.compile(r"\$\((\w+)\)")


class NotThereError(Exception):
    """A Secret that a pod mounts, or a key of it, is not there yet."""


class Pod:
    """One pod: `run` keeps it, `ready` asks its probes, `terminate` ends it as the kubelet does."""

    def __init__(self, cluster: "Cluster", owner: Object, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.kind: str = owner["kind"]
        self.owner: str = owner["metadata"]["name"]
        template = owner["spec"]["template"]
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Object = template["spec"]
        self.children: dict[str, Child] = {}
        self.left_at_s: float | None = None  # when it was asked to end
        self.ended = asyncio.Event()  # a Job's
        self._cluster = cluster
        self._root = cluster.folder / name
        self._claims = owner["spec"].get("volumeClaimTemplates", [])
        containers = self.containers
        mounts = {m["mountPath"] for c in containers for m in c.get("volumeMounts", [])}
        paths = sorted((*mounts, HEALTH), key=len, reverse=True)
        self._paths = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, paths))})(?![\w.-])")

    @property
    def containers(self) -> list[Object]:
        return [c for c in self.spec["containers"] if c["image"] in self._cluster.images]

    async def run(self) -> None:
        """Run the pod until cancelled, or until its Job is done."""
        while not self.mount():
            await asyncio.sleep(POLL_S)
        if self.kind == "Job":
            await self._run_job()
            return
        for container in self.containers:
            child = Child(
                f"{self.name}/{container['name']}",
                [self.mapped(word) for word in self._words(container)],
                self.environment(container),
                self._cluster.folder / f"{self.name}.{container['name']}.log",
                self._cluster.said.append,
            )
            child.patient = True
            self.children[container["name"]] = child
        async with asyncio.TaskGroup() as tasks:
            for child in self.children.values():
                tasks.create_task(child.keep(), name=child.name)

    async def _run_job(self) -> None:
        (container,) = self.containers
        log = self._cluster.folder / f"{self.name}.log"
        while True:
            with log.open("ab") as out:
                process = await asyncio.create_subprocess_exec(
                    *bound([self.mapped(word) for word in self._words(container)]),
                    env=self.environment(container), stdout=out, stderr=out,
                )  # fmt: skip
                try:
                    status = await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()
            if status == 0:
                self.ended.set()
                return
            await asyncio.sleep(1.0)

    @staticmethod
    def _words(container: Object) -> list[str]:
        return [*container["command"], *container.get("args", [])]

    # ------------------------------------------------------------ what the container finds

    def environment(self, container: Object) -> dict[str, str]:
        host, port = self._cluster.api
        env = {
            "PATH": f"{self._cluster.folder / 'bin'}:/usr/bin:/bin",
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": str(port),
        }
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
                env[variable["name"]] = self.name
            else:
                env[variable["name"]] = self.mapped(str(variable["value"]))
        return env

    def mapped(self, text: str) -> str:
        """The text with paths, names and addresses as they are here."""

        def path(found: re.Match[str]) -> str:
            if found[0] == HEALTH:
                return str(ROOT / "infra" / "health.py")
            return f"{self._root}{found[0]}"

        text = self._paths.sub(path, text)
        for name, address in self._cluster.names.items():
            text = text.replace(name, address)
        return text.replace("0.0.0.0", self.address)

    def mount(self) -> bool:
        """Write what the pod mounts, as far as it has changed. False: some of it is not there.

        A subPath follows, too. In a cluster its container sees the change when it starts next, and
        no process of ours reads its key at another time.
        """
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        volumes |= {claim["metadata"]["name"]: {"emptyDir": {}} for claim in self._claims}
        try:
            written = [
                (mount["mountPath"], self._files(container, mount, volumes[mount["name"]]))
                for container in self.containers
                for mount in container.get("volumeMounts", [])
            ]
        except NotThereError:
            return False
        for mounted, files in written:
            folder = Path(f"{self._root}{mounted}")
            folder.mkdir(parents=True, exist_ok=True)
            for path, content in files.items():
                file, new = folder / path, self.mapped(content.decode()).encode()
                if not file.exists() or file.read_bytes() != new:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    beside = file.with_name(f".{file.name}")
                    beside.write_bytes(new)
                    beside.replace(file)
        return True

    def _files(self, container: Object, mount: Object, volume: Object) -> dict[str, bytes]:
        """The files of a mount. Raises NotThereError."""
        files = self._cluster.files_of(volume, self.spec)
        if "subPathExpr" not in mount:
            return files
        env = self.environment(container)
        inner = VARIABLE.sub(lambda name: env[name[1]], mount["subPathExpr"]) + "/"
        return {p.removeprefix(inner): c for p, c in files.items() if p.startswith(inner)}

    # ------------------------------------------------------------ what the kubelet asks and does

    async def passes(self, kind: str) -> bool:
        """Tell whether the probes of this kind of all its containers pass."""
        for container in self.containers:
            if kind in container and not await self._passes(container, container[kind]):
                return False
        return len(self.children) == len(self.containers)

    async def ready(self) -> bool:
        return self.left_at_s is None and await self.passes("readinessProbe")

    async def _passes(self, container: Object, probe: Object) -> bool:
        if "exec" in probe:
            return await self._executed(container, probe["exec"]["command"]) == 0
        asked = probe["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        scheme = asked.get("scheme", "HTTP").lower()
        url = f"{scheme}://{self.address}:{ports[asked['port']]}{asked['path']}"
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=probe["timeoutSeconds"]) as http:
                return (await http.get(url)).status_code < httpx.codes.BAD_REQUEST
        except httpx.HTTPError:
            return False

    async def _executed(self, container: Object, command: list[str]) -> int:
        process = await asyncio.create_subprocess_exec(
            *bound([self.mapped(word) for word in command]),
            env=self.environment(container),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        return await process.wait()

    async def terminate(self) -> None:
        """Run preStop, send SIGTERM, and kill what is left after the grace, which `said` tells."""
        grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self.left_at_s = began_s = asyncio.get_running_loop().time()

        async def end(container: Object) -> None:
            before = container.get("lifecycle", {}).get("preStop")
            if before:
                assert await self._executed(container, before["exec"]["command"]) == 0
            left_s = grace_s - (asyncio.get_running_loop().time() - began_s)
            await self.children[container["name"]].stop(left_s)

        await asyncio.gather(*(end(c) for c in self.containers if c["name"] in self.children))
        self.children.clear()


class Cluster:
    """The pods of a release. `async with` runs them; left, everything is killed."""

    def __init__(self, folder: Path, objects: list[Object], others: dict[str, dict[str, bytes]]):
        """`others`: Secrets that the user has made."""
        self.folder = folder
        self.pods: dict[str, Pod] = {}
        self.names: dict[str, str] = {}  # the address of each name of a pod
        self.said: list[str] = []  # what ended, and how
        self.api = ("", 0)
        self.secrets = Secrets(objects)
        self.secrets.data |= others
        self._objects = objects
        self._subnet = f"127.{100 + random.randbelow(100)}.{random.randbelow(256)}"
        self._addresses = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stack = contextlib.AsyncExitStack()

    @property
    def images(self) -> set[str]:
        """The images whose programs are here: ours, and the server."""
        return {
            container["image"]
            for one in self._objects
            if "template" in one.get("spec", {})
            for container in one["spec"]["template"]["spec"]["containers"]
            if "exporter" not in container["image"]
        }

    async def __aenter__(self) -> Self:
        programs = self.folder / "bin"
        programs.mkdir(parents=True)
        for name, program in (("python", sys.executable), ("nats-server", str(find_binary()))):
            (programs / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
            (programs / name).chmod(0o755)
        (self.folder / "api").mkdir()
        host = self._address()
        server = api_server(self.secrets, NAMESPACE, host, self.folder / "api")
        self.api = (host, self._stack.enter_context(server))
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in self.pods.values():
            for child in pod.children.values():
                child.abandon()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._stack.aclose()

    def apply(self, objects: list[Object]) -> None:
        """Upgrade: new Jobs run, and what pods mount follows. Pods themselves are not replaced."""
        self._objects = objects
        self.secrets.apply(objects)
        self._start()
        self.refresh()

    def refresh(self) -> None:
        """Let the pods see changed Secrets and ConfigMaps, which takes a cluster a minute."""
        for pod in self.pods.values():
            if pod.children:
                assert pod.mount()

    async def until_ready(self, within_s: float, *pods: Pod) -> None:
        """Wait until these pods, or all, are ready, and until Jobs are done."""
        waiting = list(pods or self.pods.values())
        try:
            async with asyncio.timeout(within_s):
                while waiting:
                    done = [pod for pod in waiting if pod.ended.is_set() or await pod.ready()]
                    waiting = [pod for pod in waiting if pod not in done]
                    self._raise_ended()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            logs = [log for pod in waiting for log in sorted(self.folder.glob(f"{pod.name}.*log"))]
            tails = [f"{log.name}:\n{log.read_text()[-1500:]}" for log in logs]
            raise AssertionError("\n".join([*(pod.name for pod in waiting), *tails])) from None

    def of(self, component: str) -> list[Pod]:
        """The pods of a component, in their order."""
        label = "app.kubernetes.io/component"
        return [pod for pod in self.pods.values() if pod.labels[label] == component]

    async def roll_out(self, component: str, within_s: float) -> None:
        """Replace the pods of a component one after another: a Deployment starts the new one first,
        a StatefulSet, from the last ordinal on, ends the old one first.
        """
        for pod in reversed(self.of(component)):
            owner = named(self._objects)[pod.kind, pod.owner]
            if pod.kind == "StatefulSet":
                await self._end(pod)
                new = self._add(owner, pod.name, pod.address)
            else:
                new = self._add(owner, f"{pod.owner}-{random.token_hex(3)}", self._address())
            await self.until_ready(within_s, new)
            if pod.kind == "Deployment":
                await self._end(pod)

    async def scale(self, name: str, replicas: int, within_s: float) -> None:
        """Give a StatefulSet so many pods, as an autoscaler does: the last ordinal leaves first."""
        owner = named(self._objects)["StatefulSet", name]
        pods = [pod for pod in self.pods.values() if pod.owner == name]
        missing = range(len(pods), replicas)
        pods += [self._add(owner, f"{name}-{n}", self._address()) for n in missing]
        for pod in reversed(pods[replicas:]):
            await self._end(pod)
        await self.until_ready(within_s, *pods[:replicas])

    async def uninstall(self) -> None:
        """End all pods at once."""
        await asyncio.gather(*(self._end(pod) for pod in list(self.pods.values())))

    async def _end(self, pod: Pod) -> None:
        await pod.terminate()
        self._tasks.pop(pod.name).cancel()
        del self.pods[pod.name]

    @contextlib.asynccontextmanager
    async def service(self, name: str) -> AsyncIterator[str]:
        """Forward connections to the Service, each to a ready pod in turn. Yields its URL."""
        service = named(self._objects)["Service", name]
        (port,) = service["spec"]["ports"]
        host, ready, turns = self._address(), dict[Pod, int](), count()

        async def watch() -> None:
            """Ask as often as the probe says, and give a pod up after as many failures."""
            while True:
                for pod in list(self.pods.values()):
                    if service["spec"]["selector"].items() <= pod.labels.items():
                        failures = 0 if await pod.ready() else ready.get(pod, FAILURES) + 1
                        ready[pod] = failures
                await asyncio.sleep(PERIOD_S)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            late_s = asyncio.get_running_loop().time() - LAG_S
            chosen = [
                pod
                for pod, failed in ready.items()
                if failed < FAILURES and (pod.left_at_s is None or pod.left_at_s > late_s)
            ]
            if not chosen:
                writer.close()
                return
            with contextlib.suppress(OSError):
                target = _target(chosen[next(turns) % len(chosen)], port)
                there, back = await asyncio.open_connection(*target)
                await asyncio.gather(_copy(reader, back), _copy(there, writer))

        server = await asyncio.start_server(connected, host, port["port"])
        watching = asyncio.create_task(watch())
        try:
            while 0 not in ready.values():
                await asyncio.sleep(POLL_S)
            yield f"http://{host}:{port['port']}"
        finally:
            watching.cancel()
            server.close()

    # ------------------------------------------------------------ volumes

    def files_of(self, volume: Object, spec: Object) -> dict[str, bytes]:
        """The files of a volume. Raises NotThereError."""
        if "secret" in volume:
            stored = self.secrets.data.get(volume["secret"]["secretName"])
            if stored is None:
                raise NotThereError
            # the Job of the keys wrote paths of its own folder
            inner = re.compile(rf"{re.escape(str(self.folder))}/[^/]*-keys-[^/]*(?=/)".encode())
            found = {key: inner.sub(b"", content) for key, content in stored.items()}
            items = volume["secret"].get("items")
            if items is None:
                return found
            if any(item["key"] not in found for item in items):
                raise NotThereError
            return {item["path"]: found[item["key"]] for item in items}
        if "configMap" in volume:
            data = named(self._objects)["ConfigMap", volume["configMap"]["name"]]["data"]
            return {name: text.encode() for name, text in data.items()}
        if "projected" in volume:
            authority = (self.folder / "api" / "ca.crt").read_bytes()
            token = f"{TOKENS}{spec['serviceAccountName']}".encode()
            return {"token": token, "ca.crt": authority, "namespace": NAMESPACE.encode()}
        assert "emptyDir" in volume, volume
        return {}

    # ------------------------------------------------------------ pods

    def _start(self) -> None:
        """Start the pods that are not there yet."""
        owners = [one for one in self._objects if "template" in one.get("spec", {})]
        for one in sorted(owners, key=lambda one: one["kind"], reverse=True):
            name = one["metadata"]["name"]
            for n in range(one["spec"].get("replicas", 1)):
                pod = f"{name}-{n}" if one["kind"] == "StatefulSet" else f"{name}-pod-{n}"
                if pod in self.pods:
                    continue
                address = self._address()
                if one["kind"] == "StatefulSet":
                    full = f"{pod}.{one['spec']['serviceName']}.{NAMESPACE}.svc"
                    self.names[full] = address
                self._add(one, pod, address, later=True)
        for name, pod in self.pods.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(pod.run(), name=name)

    def _add(self, owner: Object, name: str, address: str, *, later: bool = False) -> Pod:
        pod = self.pods[name] = Pod(self, owner, name, address)
        if not later:
            self._tasks[name] = asyncio.create_task(pod.run(), name=name)
        return pod

    def _address(self) -> str:
        self._addresses += 1
        return f"{self._subnet}.{self._addresses}"

    def _raise_ended(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()


def _target(pod: Pod, port: dict[str, Any]) -> tuple[str, int]:
    found = {p["name"]: p["containerPort"] for c in pod.containers for p in c.get("ports", [])}
    return pod.address, found[port["targetPort"]]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
