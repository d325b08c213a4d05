"""Room: how the machine runs the training, and what it costs in time and memory."""

from lightning_fasttrain.run.atomic_checkpoints import AtomicCheckpointIO, AtomicCheckpoints
from lightning_fasttrain.run.exact_resume import ExactResume
from lightning_fasttrain.run.hang_watch import HangWatch
from lightning_fasttrain.run.matmul_precision import MatmulPrecision, matmul_precision_
from lightning_fasttrain.run.memory_files import draw_memory, save_memory_record
from lightning_fasttrain.run.memory_meter import MemoryMeter, PeakMemory
from lightning_fasttrain.run.memory_record import MemoryRecord
from lightning_fasttrain.run.memory_recording import MemoryRecording
from lightning_fasttrain.run.memory_timeline import MemoryTimeline
from lightning_fasttrain.run.preemption import Preemption
from lightning_fasttrain.run.preemption_flag import PreemptionFlag
from lightning_fasttrain.run.progress_watch import ProgressWatch
from lightning_fasttrain.run.resumable_loader import ResumableLoader, resumable
from lightning_fasttrain.run.step_meter import StepMeter, StepTimer
