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
pub use estimates::seconds;
pub use isolation::serve_as_child as serve_isolation;
pub use page_size::paged;
pub use parallel::useful;

use crate::context::Context;
use crate::parameters::Parameter;
use crate::results::{Figure, Points, Sample};
use crate::subject::{Kind, Subject};

/// Source of an experiment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Paper {
    /// The paper "Ext2 on Singularity".
    Singularity,
    /// The paper "Analysis of memory and file-system performance".
    Memory,
    /// The paper "Draconis".
    Draconis,
    /// Additional experiments of the lab.
    Lab,
}

impl Paper {
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
    pub paper: Paper,
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
    pub accepts: fn(Kind) -> bool,
    /// Number of repetitions of a quick run, and of a run of the paper's size.
    pub repetitions: (u64, u64),
    /// True if the first pass is discarded as a warm-up.
    pub warms_up: bool,
}

impl ExperimentInfo {
    /// Common defaults of the fields.
    pub const DEFAULTS: Self = Self {
        name: "",
        paper: Paper::Lab,
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
    fn about(&self) -> &ExperimentInfo;

    /// Returns the figures of the results.
    fn figures(&self) -> Vec<Figure>;

    /// Returns the bytes that a subject must hold.
    ///
    /// # Errors
    /// A parameter is invalid.
    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        let _ = context;
        Ok(64 << 20)
    }

    /// Returns the memory needed by the lab and the programs that it starts, in bytes.
    ///
    /// # Errors
    /// A parameter is invalid.
    fn memory_bytes(&self, context: &Context) -> anyhow::Result<u64> {
        let _ = context;
        Ok(64 << 20)
    }

    /// Measures one repetition.
    ///
    /// # Errors
    /// The subject fails.
    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>>;

    /// Summarizes the results in a sentence or two for each subject.
    fn summarize(&self, points: Points<'_>) -> Vec<String>;
}

/// All experiments, in the order of the papers.
pub const ALL: &[&dyn Experiment] = &[
    &seqread::SeqRead,
    &timeseries::TimeSeries,
    &latency::Latency,
    &caches::Caches,
    &channel::Channel,
    &isolation::Isolation,
    &mem::GOOD,
    &mem::BAD,
    &mem::UGLY,
    &mem::SWEEP,
    &mem::SPLIT,
    &fs_workloads::GOOD,
    &fs_workloads::BAD,
    &fs_workloads::UGLY,
    &fs_workloads::FsSweep,
    &fs_workloads::FsSplit,
    &fs_parts::FsParts,
    &fs_compete::FsCompete,
    &page_size::PageSize,
    &write_mode::WriteMode,
    &parallel::Parallel,
    &kv::ASYNC,
    &kv::SYNC,
    &kv::READ,
    &kv::LARGE,
    &append_update::AppendUpdate,
    &profile::Profile,
    &objects::Objects,
    &mount::Mount,
    &tools::Tools,
    &killed::Killed,
    &kv::KvDurable,
    &kv::KvBucket,
    &fio_check::FioCheck,
];

/// Returns the experiment with a name.
pub fn by_name(name: &str) -> Option<&'static dyn Experiment> {
    ALL.iter().copied().find(|experiment| experiment.about().name == name)
}
