"""Processes that wait for work, in groups of any size: started once, because torch takes seconds to import."""

import multiprocessing
import socket
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

MOST = 6
USED = ["torch.distributed", "snugfit.tiling.distributed", "snugfit._models", "snugfit._training.launch", "hypothesis"]


def forking():
    """Makes processes that have imported what they use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(USED)
    return context


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Processes:
    """Up to six processes over gloo on this machine."""

    def __init__(self):
        context, port = forking(), free_port()
        pipes = [context.Pipe() for _ in range(MOST)]
        self.ends = [mine for mine, _ in pipes]
        self.workers = [
            context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker in self.workers:
            worker.start()

    def run(self, function, *arguments, processes):
        """What ``function(group, rank, *arguments)`` returns on each of the first processes."""
        for end in self.ends[:processes]:
            end.send((function, arguments, processes))
        answers = []
        for end in self.ends[:processes]:
            assert end.poll(60), "a process does not answer"
            answers.append(end.recv())
        errors = [text for text, _ in answers if text]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    def stop(self):
        for worker in self.workers:
            worker.kill()


def _serve(pipe, rank, port):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, MOST, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MOST, timeout=timedelta(seconds=120))
    groups = {count: dist.new_group(list(range(count))) for count in range(1, MOST + 1)}
    while True:
        function, arguments, count = pipe.recv()
        try:
            pipe.send(("", function(groups[count], rank, *arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
