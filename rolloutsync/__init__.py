"""rolloutsync drives SGLang rollout engines from synchronous trainers: threads, no asyncio.

client = RolloutClient(urls)
samples = client.generate(batch)      # blocks; every sample comes back, in order, or says why not
client.abort_until_idle()             # between steps: proves that the engines are idle
"""

import logging

from rolloutsync.audit import Audit, OpenSample, Orphan
from rolloutsync.client import MemberChanges, RolloutClient
from rolloutsync.collected import Collected
from rolloutsync.config import RetryPolicy, Timeouts
from rolloutsync.episodes import Episode, EpisodeStatus
from rolloutsync.errors import (
    BatchError,
    ClientClosedError,
    CollectError,
    ControlError,
    DeadlineExceededError,
    EngineAbortError,
    EngineHTTPError,
    EngineLaunchError,
    EngineUnavailableError,
    EpisodeError,
    EpisodeInterrupt,
    ForkedError,
    NotIdleError,
    PoisonPromptError,
    ProtocolError,
    RolloutError,
    TransportError,
    UnsupportedError,
    WeightUpdateError,
    WrongServerError,
)
from rolloutsync.idle import DrainReport
from rolloutsync.jobs import Job
from rolloutsync.owner import install_sigterm
from rolloutsync.proof import IdleState
from rolloutsync.sample import Finish, Prompt, Sample, Status, Timing, TopLogprobs, WeightSpan
from rolloutsync.slot import EngineState, EngineStatus
from rolloutsync.stats import EngineStats, Stats
from rolloutsync.storage import load_samples, save_samples
from rolloutsync.sweep import EngineDrain
from rolloutsync.transcript import Transcript, TranscriptSegment
from rolloutsync.turn import Turn
from rolloutsync.weight_groups import WeightGroup
from rolloutsync.weight_report import EngineUpdate, UpdateReport, UpdateState
from rolloutsync.weight_update import WeightUpdate

__all__ = [
    "Audit",
    "BatchError",
    "ClientClosedError",
    "CollectError",
    "Collected",
    "ControlError",
    "DeadlineExceededError",
    "DrainReport",
    "EngineAbortError",
    "EngineDrain",
    "EngineHTTPError",
    "EngineLaunchError",
    "EngineState",
    "EngineStats",
    "EngineStatus",
    "EngineUnavailableError",
    "EngineUpdate",
    "Episode",
    "EpisodeError",
    "EpisodeInterrupt",
    "EpisodeStatus",
    "Finish",
    "ForkedError",
    "IdleState",
    "Job",
    "MemberChanges",
    "NotIdleError",
    "OpenSample",
    "Orphan",
    "PoisonPromptError",
    "Prompt",
    "ProtocolError",
    "RetryPolicy",
    "RolloutClient",
    "RolloutError",
    "Sample",
    "Stats",
    "Status",
    "Timeouts",
    "Timing",
    "TopLogprobs",
    "Transcript",
    "TranscriptSegment",
    "TransportError",
    "Turn",
    "UnsupportedError",
    "UpdateReport",
    "UpdateState",
    "WeightGroup",
    "WeightSpan",
    "WeightUpdate",
    "WeightUpdateError",
    "WrongServerError",
    "install_sigterm",
    "load_samples",
    "save_samples",
]

logging.getLogger("rolloutsync").addHandler(logging.NullHandler())
