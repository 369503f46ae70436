//! Durable appends and durable overwrites of single records.

use super::{Experiment, ExperimentInfo, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::parameter;
use crate::results::{Figure, Points, Sample, Shape};
use crate::subject::{Kind, OpenMode, Subject};
use crate::units;

/// See the module.
pub struct AppendUpdate;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "append-update",
    paper: Paper::Draconis,
    question: "How many durable writes of 512 bytes and of 4 KB are made in a second, appending and \
           updating?",
    published_result: "Figure 9: updates of exactly a flash page (4 KB) are over 4 times as fast as the \
              others; appends of 4 KB are not, because their metadata is smaller than a page. \
              Synchronous LevelDB is as fast as appending 512 bytes. An SSD is 250 times a disk.",
    caveat: "The 4 times of an update of a whole page show where nothing hides read-modify- \
               write: a capacitor's buffer before the flash, as in the model, answers before it. \
               What remains is the second write of a file that grew. Between the devices stands \
               one turn of the platter (120 in a second) against a write into that buffer (25 µs \
               published, so 40 K/s and 330 times; half of that where a growing file is written \
               twice). The paper's 250 times lies between the two.",
    parameters: &[
        parameter("sizes", "sizes of a write", "512,4K", "512,4K"),
        parameter("writes", "writes of each kind", "100", "1000"),
    ],
    subjects: &["dir", "kernel:ext2", "draconis", "draconis-lib", "model:ssd", "model:hdd"],
    accepts: |kind| kind != Kind::KeyValue,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for AppendUpdate {
    fn about(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Bars, "rate", "Durable writes in a second")
                .y("writes", "/s")
                .log_y(),
        ]
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let writes = context.number("writes")?;
        let mut samples = vec![];
        for size in context.numbers("sizes")? {
            let mut bytes = Buffer::new(size as usize);
            context.rng().fill(&mut bytes);
            let file = files.create("append-update", size * writes, OpenMode::Cached)?;
            for what in ["append", "update"] {
                let mut watch = Stopwatch::start(&*clock);
                for nth in 0..writes {
                    context.check()?;
                    file.write(nth * size, &bytes)?;
                    file.sync()?;
                }
                let rate = writes as f64 * 1e9 / watch.lap_ns().max(1) as f64;
                let label = format!("{what} {}", units::bytes(size as f64));
                samples.push(Sample::named("rate", "", &label, rate));
            }
            drop(file);
            files.remove("append-update")?;
        }
        Ok(samples)
    }

    fn summarize(&self, points: Points<'_>) -> Vec<String> {
        let at = |subject: &str, label: &str| points.named("rate", subject, "", label);
        let tell = |subject: &&str| {
            let (small, page) = (at(subject, "append 512 B")?, at(subject, "update 4 KiB")?);
            Some(format!(
                "{subject}: {} appends of 512 bytes, {} updates of 4 KiB: {} times.",
                units::in_unit(small, "/s"),
                units::in_unit(page, "/s"),
                units::significant(page / small),
            ))
        };
        let mut found: Vec<String> = points.subjects().iter().filter_map(tell).collect();
        let between = |label| Some(at("model:ssd", label)? / at("model:hdd", label)?);
        if let (Some(append), Some(update)) = (between("append 512 B"), between("update 4 KiB")) {
            found.push(format!(
                "Between the models: {} times for durable appends of 512 bytes, {} for updates of \
                 4 KiB.",
                units::significant(append),
                units::significant(update),
            ));
        }
        found
    }
}
