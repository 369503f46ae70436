//! Durable appends and durable overwrites of single records.

use super::{Experiment, ExperimentInfo, PaperSource};
use crate::buffer::AlignedBuffer;
use crate::clock::Stopwatch;
use crate::context::RunContext;
use crate::parameters::new_parameter;
use crate::results::{Figure, FigureShape, PointQuery, Sample};
use crate::subject::{OpenMode, Subject, SubjectKind};
use crate::units;

/// See the module.
pub struct AppendUpdateExperiment;

const ABOUT: ExperimentInfo = ExperimentInfo {
    name: "append-update",
    paper: PaperSource::Draconis,
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
        new_parameter("sizes", "sizes of a write", "512,4K", "512,4K"),
        new_parameter("writes", "writes of each kind", "100", "1000"),
    ],
    subjects: &["dir", "kernel:ext2", "draconis", "draconis-lib", "model:ssd", "model:hdd"],
    accepts: |kind| kind != SubjectKind::KeyValue,
    ..ExperimentInfo::DEFAULTS
};

impl Experiment for AppendUpdateExperiment {
    fn info(&self) -> &ExperimentInfo {
        &ABOUT
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(FigureShape::Bars, "rate", "Durable writes in a second")
                .with_y_axis("writes", "/s")
                .with_log_y(),
        ]
    }

    fn run(&self, context: &RunContext, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let (clock, files) = (subject.clock(), subject.files()?);
        let writes = context.number_parameter("writes")?;
        let mut samples = vec![];
        for size in context.number_list_parameter("sizes")? {
            let mut bytes = AlignedBuffer::new(size as usize);
            context.new_rng().fill(&mut bytes);
            let file = files.create("append-update", size * writes, OpenMode::Cached)?;
            for what in ["append", "update"] {
                let mut watch = Stopwatch::start(&*clock);
                for nth in 0..writes {
                    context.check_not_stopped()?;
                    file.write(nth * size, &bytes)?;
                    file.sync()?;
                }
                let rate = writes as f64 * 1e9 / watch.lap_ns().max(1) as f64;
                let label = format!("{what} {}", units::format_bytes(size as f64));
                samples.push(Sample::labelled("rate", "", &label, rate));
            }
            drop(file);
            files.remove("append-update")?;
        }
        Ok(samples)
    }

    fn summarize(&self, points: PointQuery<'_>) -> Vec<String> {
        let at = |subject: &str, label: &str| points.median_of_label("rate", subject, "", label);
        let tell = |subject: &&str| {
            let (small, page) = (at(subject, "append 512 B")?, at(subject, "update 4 KiB")?);
            Some(format!(
                "{subject}: {} appends of 512 bytes, {} updates of 4 KiB: {} times.",
                units::format_in_unit(small, "/s"),
                units::format_in_unit(page, "/s"),
                units::format_significant(page / small),
            ))
        };
        let mut found: Vec<String> = points.subjects().iter().filter_map(tell).collect();
        let between = |label| Some(at("model:ssd", label)? / at("model:hdd", label)?);
        if let (Some(append), Some(update)) = (between("append 512 B"), between("update 4 KiB")) {
            found.push(format!(
                "Between the models: {} times for durable appends of 512 bytes, {} for updates of \
                 4 KiB.",
                units::format_significant(append),
                units::format_significant(update),
            ));
        }
        found
    }
}
