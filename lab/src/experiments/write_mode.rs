//! Random writes, sequential overwrites, and appends.

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct WriteModeExperiment;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "write-mode",
    paper: PaperSource::Draconis,
    question: "How fast are random writes, sequential rewrites and sequential writes of a new file?",
    published_result: "Figure 2: random writes and sequential rewrites are equally fast on an SSD; writing \
              a new file is slower, because its metadata is smaller than a page and costs a \
              read-modify-write.",
    caveat: "Where a durable append is slower, the metadata that goes with it is the second \
               write, as the paper says; on model:hdd each write is a turn of the platter, \
               whatever its place.",
    parameters: &[
        new_parameter("block", "size of a write", "4K", "4K"),
        new_parameter("writes", "writes of each mode", "150", "2000"),
        new_parameter("sync_every", "an fsync comes after so many", "1", "1"),
    ],
    subjects: &["dir", "kernel:ext2", "draconis", "model:ssd", "model:hdd"],
    accepts: |kind| kind != SubjectKind::KeyValue,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for WriteModeExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "speed", "Throughput by write mode")
                .with_y_axis("written", "B/s"),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let (block, writes) =
            (context.number_parameter("block")?, context.number_parameter("writes")?);
        let every = context.number_parameter("sync_every")?.max(1);
        let bytes = block * writes;
        let mut piece = AlignedBuffer::new(block as usize);
        let mut dice = context.new_rng();
        dice.fill(&mut piece);
        let mut samples = vec![];
        super::reading::prepare_file(context, &files, "old", bytes)?;
        for mode in ["rndwr", "seqrewr", "seqwr"] {
            let file = match mode {
                "seqwr" => files.create("new", bytes, OpenMode::Cached)?,
                _ => files.open("old", OpenMode::Cached)?,
            };
            let order = match mode {
                "rndwr" => dice.shuffled(writes),
                _ => (0..writes).collect(),
            };
            let mut watch = Stopwatch::start(&*clock);
            for (nth, place) in (1..).zip(order) {
                context.check_not_stopped()?;
                file.write(place * block, &piece)?;
                if nth % every == 0 {
                    file.sync()?;
                }
            }
            file.sync()?;
            let speed = bytes as f64 * 1e9 / watch.lap_ns().max(1) as f64;
            samples.push(Sample::labelled("speed", "", mode, speed));
        }
        files.remove("new")?;
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let at = |mode| points.median_of_label("speed", subject, "", mode);
            let (random, again, new) = (at("rndwr")?, at("seqrewr")?, at("seqwr")?);
            Some(format!(
                "{subject}: random {} of sequential rewriting ({}), appending {} of it.",
                units::format_significant(random / again),
                units::format_in_unit(again, "B/s"),
                units::format_significant(new / again),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
