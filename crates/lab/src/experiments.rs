//! The experiments, one file each.

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

/// Where an experiment is from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Paper {
    /// Ext2 on Singularity.
    Singularity,
    /// Analysis of memory and file-system performance.
    Memory,
    /// Draconis.
    Draconis,
    /// What else one wants to know.
    Lab,
}

impl Paper {
    /// Its title.
    pub fn title(self) -> &'static str {
        match self {
            Self::Singularity => "Ext2 on Singularity",
            Self::Memory => "Analysis of memory and file-system performance",
            Self::Draconis => "Draconis: rethinking the storage stack",
            Self::Lab => "The stack beside its peers",
        }
    }
}

/// What can be said of an experiment before it is run.
#[derive(Clone, Copy)]
pub struct About {
    /// Its name on the command line.
    pub name: &'static str,
    /// Where it is from.
    pub paper: Paper,
    /// What it asks.
    pub asks: &'static str,
    /// What the paper found.
    pub finding: &'static str,
    /// Why it may differ from what the paper found; nothing if there is nothing to say.
    pub explains: &'static str,
    /// What can be changed about it.
    pub parameters: &'static [Parameter],
    /// What it runs against if nothing is asked for.
    pub subjects: &'static [&'static str],
    /// Whether it can use a subject of that sort.
    pub takes: fn(Kind) -> bool,
    /// How often it is repeated in a quick run, and in one of the paper's size.
    pub repetitions: (u64, u64),
    /// Whether a first pass is thrown away.
    pub warms_up: bool,
}

impl About {
    /// What most have, for the rest of an experiment's own.
    pub const USUAL: Self = Self {
        name: "",
        paper: Paper::Lab,
        asks: "",
        finding: "",
        explains: "",
        parameters: &[],
        subjects: &[],
        takes: |_| true,
        repetitions: (3, 3),
        warms_up: true,
    };
}

/// One experiment.
pub trait Experiment: Sync {
    /// What can be said of it.
    fn about(&self) -> &About;

    /// How it is drawn.
    fn figures(&self) -> Vec<Figure>;

    /// Bytes that a subject must hold.
    ///
    /// # Errors
    /// If a parameter makes no sense.
    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        let _ = context;
        Ok(64 << 20)
    }

    /// Memory that it takes, of ours and of the programs that it starts.
    ///
    /// # Errors
    /// If a parameter makes no sense.
    fn memory_bytes(&self, context: &Context) -> anyhow::Result<u64> {
        let _ = context;
        Ok(64 << 20)
    }

    /// Measures once.
    ///
    /// # Errors
    /// What the subject says.
    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>>;

    /// What was found here, in words: a sentence or two for each subject.
    fn found(&self, points: Points<'_>) -> Vec<String>;
}

/// All of them, in the order of the papers.
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

/// The experiment of that name.
pub fn by_name(name: &str) -> Option<&'static dyn Experiment> {
    ALL.iter().copied().find(|experiment| experiment.about().name == name)
}
