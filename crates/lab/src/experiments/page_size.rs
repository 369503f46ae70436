//! Writes of every multiple of a sector: which size does the device work in?

use super::{Experiment, Paper};
use crate::buffer::Buffer;
use crate::clock::Stopwatch;
use crate::context::Context;
use crate::parameters::{Parameter, parameter};
use crate::results::{Figure, Points, Sample, Shape};
use crate::stats;
use crate::subject::{How, Kind, Subject};
use crate::units;

/// See the module.
pub struct PageSize;

/// A sector, in bytes.
const SECTOR: u64 = 512;
/// The largest page looked for, in bytes.
const MOST_PAGE: u64 = 16 << 10;
/// Every write begins on a multiple of this, so that at most its end lies inside a page.
const STRIDE: u64 = 64 << 10;
/// How much faster a whole page must be than a sector less.
const KNEE: f64 = 0.9;

/// Sizes that tell any page from the next.
const QUICK: &str = "512,1024,1536,2048,2560,3584,4096,4608,7680,8192,8704,15872,16384,16896";
const PAPER: &str = "512,1024,1536,2048,2560,3072,3584,4096,4608,5120,5632,6144,6656,7168,7680,\
                     8192,8704,12288,15872,16384,16896,20480,24576,32768";

impl Experiment for PageSize {
    fn name(&self) -> &'static str {
        "page-size"
    }

    fn paper(&self) -> Paper {
        Paper::Draconis
    }

    fn asks(&self) -> &'static str {
        "How fast are writes by their size in multiples of 512 bytes, and which page does that \
         betray?"
    }

    fn finding(&self) -> &'static str {
        "Figure 1: throughput is much higher with blocks of 4 KB and 8 KB, so the page is 4 KB: \
         whatever is no multiple of it costs a read-modify-write."
    }

    fn parameters(&self) -> &'static [Parameter] {
        const ALL: &[Parameter] = &[
            parameter("sizes", "sizes of a write", QUICK, PAPER),
            parameter("writes", "writes of each size", "60", "2000"),
            parameter("area", "bytes that are written all over", "16M", "1G"),
        ];
        ALL
    }

    fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::new(Shape::Lines, "speed", "Write throughput by block size")
                .x("block", "B")
                .y("written", "B/s")
                .log_x(),
            Figure::new(Shape::Lines, "time", "Time of one write")
                .x("block", "B")
                .y("time for a write", "ns")
                .log_x()
                .log_y(),
        ]
    }

    fn subjects(&self) -> &'static [&'static str] {
        &["file", "dir", "model:ssd", "model:ssd,page=16K", "model:hdd"]
    }

    fn takes(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Raw | Kind::Directory | Kind::Model)
    }

    fn bytes(&self, context: &Context) -> anyhow::Result<u64> {
        context.number("area")
    }

    fn run(&self, context: &Context, subject: &mut dyn Subject) -> anyhow::Result<Vec<Sample>> {
        let area = context.number("area")?;
        super::reading::prepare(context, &subject.files()?, "area", area)?;
        let mut samples = vec![];
        for size in context.numbers("sizes")? {
            let Some(times) = write_times(context, subject, size, area, context.number("writes")?)?
            else {
                let name = subject.name();
                context.note(format!("{name}: takes no direct writes of {size} bytes"));
                continue;
            };
            let ns = stats::median(&times).unwrap_or(0.0).max(1.0);
            samples.push(Sample::at("speed", "", size as f64, size as f64 * 1e9 / ns));
            samples.push(Sample::at("time", "", size as f64, ns));
        }
        Ok(samples)
    }

    fn found(&self, points: Points<'_>) -> Vec<String> {
        let tell = |subject: &&str| {
            let times = points.line("time", subject, "");
            (!times.is_empty()).then(|| match infer(&times) {
                Some(page) => {
                    format!("{subject}: the page is {}: less costs more.", units::bytes(page))
                }
                None => format!(
                    "{subject}: no size costs less than a sector less of it: no page shows \
                     (512 B, or a cache before it)."
                ),
            })
        };
        points.subjects().iter().filter_map(tell).collect()
    }
}

/// The times of direct writes of `size` to random multiples of [`STRIDE`]; `None` if the
/// subject does not take that size.
pub fn write_times(
    context: &Context,
    subject: &dyn Subject,
    size: u64,
    area: u64,
    writes: u64,
) -> anyhow::Result<Option<Vec<f64>>> {
    let clock = subject.clock();
    let file = subject.files()?.open("area", How::Direct)?;
    let mut bytes = Buffer::new(size as usize);
    let mut dice = context.dice();
    dice.fill(&mut bytes);
    let places = (area / STRIDE).max(1);
    if file.write(0, &bytes).is_err() {
        return Ok(None);
    }
    let mut times = Vec::with_capacity(writes as usize);
    let mut watch = Stopwatch::start(&*clock);
    for _ in 0..writes {
        context.check()?;
        file.write(dice.below(places) * STRIDE, &bytes)?;
        times.push(watch.lap_ns() as f64);
    }
    Ok(Some(times))
}

/// The page that times of writes by size betray: the smallest power of two that is written
/// faster than a sector less of it, and faster than a sector more.
pub fn infer(times: &[(f64, f64)]) -> Option<f64> {
    let at = |size: u64| times.iter().find(|(x, _)| *x == size as f64).map(|(_, ns)| *ns);
    let mut page = SECTOR * 2;
    while page <= MOST_PAGE {
        if let (Some(less), Some(ns), Some(more)) = (at(page - SECTOR), at(page), at(page + SECTOR))
            && ns < less * KNEE
            && ns < more * KNEE
        {
            return Some(page as f64);
        }
        page *= 2;
    }
    // In a device that works in sectors, a sector costs less than two and nothing has a knee.
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write of a part of a page costs a read more.
    fn device(page: u64) -> Vec<(f64, f64)> {
        let sizes = QUICK.split(',').map(|size| size.parse::<u64>().unwrap());
        let time = |size: u64| {
            let partial = !size.is_multiple_of(page);
            (size.div_ceil(page) * 100 + u64::from(partial) * 60) as f64
        };
        sizes.map(|size| (size as f64, time(size))).collect()
    }

    #[test]
    fn every_page_is_named() {
        for page in [1024, 2048, 4096, 8192, 16384] {
            assert_eq!(infer(&device(page)), Some(page as f64), "{page}");
        }
        assert_eq!(infer(&device(512)), None);
    }
}
