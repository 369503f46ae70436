//! Experiments, one file each.

mod append_update;
mod caches;
mod channel;
mod estimates;
mod fio_check;
mod fs_compete;
mod fs_parts;
mod fs_workloads;
mod isolation;
mod killed;
mod kv;
mod latency;
mod mem;
mod mount;
mod objects;
mod page_size;
mod parallel;
mod profile;
mod reading;
mod seqread;
mod timeseries;
mod tools;
mod write_mode;
mod writing;

pub use channel::serve_as_child as serve_channel;
pub use estimates::estimated_seconds;
pub use isolation::serve_as_child as serve_isolation;
pub use page_size::page_size_with_times;
pub use parallel::fewest_sufficient_threads;

use crate::context::RunContext;
use crate::parameters::Parameter;
use crate::results::{Figure, PointQuery, Sample};
use crate::subject::{Subject, SubjectKind};

/// Source of an experiment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PaperSource {
    /// The paper "Ext2 on Singularity".
    Singularity,
    /// The paper "Analysis of memory and file-system performance".
    Memory,
    /// The paper "Draconis".
    Draconis,
    /// Additional experiments of the lab.
    Lab,
}

impl PaperSource {
    /// Returns the title.
    pub fn title(self) -> &'static str {
        match self {
            Self::Singularity => "Ext2 on Singularity",
            Self::Memory => "Analysis of memory and file-system performance",
            Self::Draconis => "Draconis: rethinking the storage stack",
            Self::Lab => "The stack beside its peers",
        }
    }
}

/// Static description of an experiment.
#[derive(Clone, Copy)]
pub struct ExperimentInfo {
    /// Name on the command line.
    pub name: &'static str,
    /// Paper that it is from.
    pub paper: PaperSource,
    /// Question that it answers.
    pub question: &'static str,
    /// Result published in the paper.
    pub published_result: &'static str,
    /// Reason why results may differ from the paper; empty if none.
    pub caveat: &'static str,
    /// Parameters.
    pub parameters: &'static [Parameter],
    /// Default subjects.
    pub subjects: &'static [&'static str],
    /// Returns true for kinds of subjects that the experiment can use.
    pub accepts: fn(SubjectKind) -> bool,
    /// Number of repetitions of a quick run, and of a run of the paper's size.
    pub repetitions: (u64, u64),
    /// True if the first pass is discarded as a warm-up.
    pub warms_up: bool,
}

impl ExperimentInfo {
    /// Common defaults of the fields.
    pub const DEFAULTS: Self = Self {
        name: "",
        paper: PaperSource::Lab,
        question: "",
        published_result: "",
        caveat: "",
        parameters: &[],
        subjects: &[],
        accepts: |_| true,
        repetitions: (3, 3),
        warms_up: true,
    };
}

/// An experiment.
pub trait Experiment: Sync {
    /// Returns the description.
    fn info(&self) -> &ExperimentInfo;

    /// Returns the figures of the results.
    fn figures(&self) -> Vec<Figure>;

    /// Returns the bytes that a subject must hold.
    ///
    /// # Errors
    /// A parameter is invalid.
    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        let _ = context;
        Ok(64 << 20)
    }

    /// Returns the memory needed by the lab and the programs that it starts, in bytes.
    ///
    /// # Errors
    /// A parameter is invalid.
    fn required_memory_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        let _ = context;
        Ok(64 << 20)
    }

    /// Measures one repetition.
    ///
    /// # Errors
    /// The subject fails.
    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>>;

    /// Summarizes the results in a sentence or two for each subject.
    fn summarize(&self, points: PointQuery<'_>) -> Vec<String>;
}

/// All experiments, in the order of the papers.
pub const ALL_EXPERIMENTS: &[&dyn Experiment] = &[
    &seqread::SequentialReadExperiment,
    &timeseries::TimeSeriesExperiment,
    &latency::LatencyExperiment,
    &caches::CacheSizeExperiment,
    &channel::ChannelExperiment,
    &isolation::IsolationExperiment,
    &mem::MEM_GOOD,
    &mem::MEM_BAD,
    &mem::MEM_UGLY,
    &mem::MEM_SWEEP,
    &mem::MEM_SPLIT,
    &fs_workloads::FS_GOOD,
    &fs_workloads::FS_BAD,
    &fs_workloads::FS_UGLY,
    &fs_workloads::FsyncIntervalSweep,
    &fs_workloads::WorkloadShareExperiment,
    &fs_parts::WriteCostPartsExperiment,
    &fs_compete::CompetingFsyncExperiment,
    &page_size::PageSizeExperiment,
    &write_mode::WriteModeExperiment,
    &parallel::ParallelWriteExperiment,
    &kv::KV_ASYNC,
    &kv::KV_SYNC,
    &kv::KV_READ,
    &kv::KV_LARGE,
    &append_update::AppendUpdateExperiment,
    &profile::StorageProfileExperiment,
    &objects::ObjectStoreExperiment,
    &mount::MountExperiment,
    &tools::ToolComparisonExperiment,
    &killed::WorkerDeathExperiment,
    &kv::KvDurableCallsExperiment,
    &kv::KvBucketExperiment,
    &fio_check::FioComparison,
];

/// Returns the experiment with a name.
pub fn find_by_name(name: &str) -> Option<&'static dyn Experiment> {
    ALL_EXPERIMENTS.iter().copied().find(|experiment| experiment.info().name == name)
}
