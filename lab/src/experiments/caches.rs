//! The same reads with each cache of the library off, small and full.

use anyhow::Context as _;
use draconis_ext::OpenOptions;

use super::reading::{prepare_file, read_all};
use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct CacheSizeExperiment;

/// Returns the cache configurations, from full to none.
fn cache_configurations() -> [(&'static str, OpenOptions); 8] {
    let full = OpenOptions::default();
    let small =
        OpenOptions { inode_cache: 4, block_map_cache: 4, data_cache_bytes: 1 << 20, ..full };
    let none = OpenOptions {
        inode_cache: 0,
        block_map_cache: 0,
        data_cache_bytes: 0,
        read_ahead_bytes: 0,
        ..full
    };
    [
        ("all full", full),
        ("no read-ahead", OpenOptions { read_ahead_bytes: 0, ..full }),
        ("no inode cache", OpenOptions { inode_cache: 0, ..full }),
        ("no block-map cache", OpenOptions { block_map_cache: 0, ..full }),
        ("data cache 1 MiB", OpenOptions { data_cache_bytes: 1 << 20, ..full }),
        ("no data cache", OpenOptions { data_cache_bytes: 0, ..full }),
        ("all small", small),
        ("all off", none),
    ]
}

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "caches",
    paper: PaperSource::Singularity,
    question: "What is each of the library's caches worth, to a file that is read for the first and \
           for the second time?",
    published_result: "The slides: large files are unusable without the block-number cache; the 350 MB file \
              is read 8300 times faster with caching.",
    caveat: "8300 times was the price of walking the indirect blocks with a head. Here a run of \
               blocks is one entry, and what leads to it lies in the data cache: each cache alone \
               is worth less, all together still orders of magnitude.",
    parameters: &[
        new_parameter("file", "length of the file", "8M", "350M"),
        new_parameter("buffer", "size of a read", "16K", "16K"),
        new_parameter("most_ms", "a pass stops after so many milliseconds", "150", "4000"),
    ],
    subjects: &["draconis-lib"],
    accepts: |kind| kind == SubjectKind::Library,
    warms_up: false,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for CacheSizeExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "speed", "Reading speed by what is cached")
                .with_y_axis("read speed", "B/s")
                .with_log_y(),
            Figure::new(FigureShape::Bars, "hits", "Hit rate of the data cache")
                .with_y_axis("hits", "%"),
        ]
    }

    fn required_bytes(&self, context: &RunContext) -> anyhow::Result<u64> {
        context.number_parameter("file")
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, bytes) = (subject.clock(), context.number_parameter("file")?);
        let buffer = context.number_parameter("buffer")?.min(bytes);
        let most_ns = context.number_parameter("most_ms")? * 1_000_000;
        prepare_file(context, &subject.files()?, "caches", bytes)?;
        let mut into = AlignedBuffer::new(buffer as usize);
        let mut samples = vec![];
        for (name, options) in cache_configurations() {
            subject.library_subject().context("our library")?.reopen(options)?;
            let file = subject.files()?.open("caches", OpenMode::Cached)?;
            for pass in ["first time", "second time"] {
                let mut watch = Stopwatch::start(&*clock);
                let (mut at, mut spent) = (0, 0);
                while at + buffer <= bytes && spent < most_ns {
                    context.check_not_stopped()?;
                    read_all(&*file, at, &mut into)?;
                    at += buffer;
                    spent += watch.lap_ns();
                }
                let speed = at as f64 * 1e9 / spent.max(1) as f64;
                samples.push(Sample::labelled("speed", pass, name, speed));
            }
            drop(file);
            let data = subject.library_subject().context("our library")?.statistics()?.data;
            let asked = (data.hits + data.misses).max(1) as f64;
            let rate = data.hits as f64 * 100.0 / asked;
            samples.push(Sample::labelled("hits", "data cache", name, rate));
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let at = |label| points.median_of_label("speed", subject, "second time", label);
            let (full, off, no_map) = (at("all full")?, at("all off")?, at("no block-map cache")?);
            Some(format!(
                "{subject}: the second time {} with all caches and {} without any: {} times. \
                 Without the block-map cache alone {}: a run of blocks takes few entries here, \
                 and what leads to them is in the data cache.",
                units::format_in_unit(full, "B/s"),
                units::format_in_unit(off, "B/s"),
                units::format_significant(full / off),
                units::format_in_unit(no_map, "B/s"),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
