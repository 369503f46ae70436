//! Random writes, sequential overwrites, and appends.

use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct WriteMode;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "write-mode",
    paper: Paper::Draconis,
    question: "How fast are random writes, sequential rewrites and sequential writes of a new file?",
    published_result: "Figure 2: random writes and sequential rewrites are equally fast on an SSD; writing \
              a new file is slower, because its metadata is smaller than a page and costs a \
              read-modify-write.",
    caveat: "Where a durable append is slower, the metadata that goes with it is the second \
               write, as the paper says; on model:hdd each write is a turn of the platter, \
               whatever its place.",
    parameters: &[
        parameter("block", "size of a write", "4K", "4K"),
        parameter("writes", "writes of each mode", "150", "2000"),
        parameter("sync_every", "an fsync comes after so many", "1", "1"),
    ],
    subjects: &["dir", "kernel:ext2", "draconis", "model:ssd", "model:hdd"],
    accepts: |kind| kind != Kind::KeyValue,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for WriteMode {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![Figure::new(Shape::Bars, "speed", "Throughput by write mode").y("written", "B/s")]
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let (block, writes) = (context.number("block")?, context.number("writes")?);
        let every = context.number("sync_every")?.max(1);
        let bytes = block * writes;
        let mut piece = Buffer::new(block as usize);
        let mut dice = context.rng();
        dice.fill(&mut piece);
        let mut samples = vec![];
        super::reading::prepare(context, &files, "old", bytes)?;
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
                context.check()?;
                file.write(place * block, &piece)?;
                if nth % every == 0 {
                    file.sync()?;
                }
            }
            file.sync()?;
            let speed = bytes as f64 * 1e9 / watch.lap_ns().max(1) as f64;
            samples.push(Sample::named("speed", "", mode, speed));
        }
        files.remove("new")?;
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let at = |mode| points.named("speed", subject, "", mode);
            let (random, again, new) = (at("rndwr")?, at("seqrewr")?, at("seqwr")?);
            Some(format!(
                "{subject}: random {} of sequential rewriting ({}), appending {} of it.",
                units::significant(random / again),
                units::in_unit(again, "B/s"),
                units::significant(new / again),
            ))
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}
