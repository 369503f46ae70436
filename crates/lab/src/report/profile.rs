//! What the numbers say, in plain words: ten lines, and what to do about them.
//!
//! Every sentence has its number from the results; what was not measured is not said.

use crate::experiments::{page_of, useful};
use crate::results::{Outcome, Points, Results};
use crate::units::{bytes, in_unit, significant, time_ns};

/// Lines of the profile at most.
const LINES: usize = 10;
/// A ratio below which distance costs nothing.
const FLAT: f64 = 1.3;

/// The profile and the guidance.
pub struct Words {
    /// The machine's storage in lines of plain words.
    pub profile: Vec<String>,
    /// What is good, what is bad, and what is ugly.
    pub guidance: Vec<(&'static str, Vec<String>)>,
}

/// Reads the results.
pub fn words(results: &Results) -> Words {
    let all = Found { results };
    let profile = [
        all.reading(),
        all.distance(),
        all.page(),
        all.durable(),
        all.parallel(),
        all.syncing(),
        all.growing(),
        all.competing(),
        all.paging(),
        all.calls(),
    ];
    let guidance = vec![
        ("Good: do this", all.good()),
        ("Bad: avoid this", all.bad()),
        ("Ugly: know what it costs", all.ugly()),
    ];
    Words {
        profile: profile.into_iter().flatten().take(LINES).collect(),
        guidance: guidance.into_iter().filter(|(_, lines)| !lines.is_empty()).collect(),
    }
}

struct Found<'a> {
    results: &'a Results,
}

impl<'a> Found<'a> {
    fn outcome(&self, name: &str) -> Option<&'a Outcome> {
        self.results.experiments.iter().find(|outcome| outcome.name == name)
    }

    /// The experiment's points and its first subject that is of this world.
    fn real(&self, name: &str) -> Option<(Points<'a>, &'a str)> {
        let points = self.outcome(name)?.look();
        let subjects = points.subjects();
        let real = subjects.into_iter().find(|s| !s.starts_with("model") && *s != "delay")?;
        Some((points, real))
    }

    fn request(&self, what: &str) -> Option<f64> {
        let (points, subject) = self.real("profile")?;
        points.named("time", subject, "", what)
    }

    /// The best buffer and its speed, and the speed of the smallest one.
    fn buffer(&self) -> Option<(f64, f64, f64, f64)> {
        let (points, subject) = self.real("profile")?;
        let line = points.line("read", subject, "");
        let ((best, speed), (small, slow)) = (useful(&line)?, *line.first()?);
        Some((best, speed, small, slow))
    }

    fn threads(&self) -> Option<(f64, f64, f64)> {
        let (points, subject) = self.real("parallel").or_else(|| self.real("profile"))?;
        let line = points.line("rate", subject, "");
        let ((threads, rate), (_, one)) = (useful(&line)?, *line.first()?);
        Some((threads, rate, one))
    }

    /// Writes between two fsyncs and the throughput, from few to many.
    fn sweep(&self) -> Option<Vec<(f64, f64)>> {
        let outcome = self.outcome("fs-sweep")?;
        let (points, subject) = self.real("fs-sweep")?;
        let writes = outcome.parameters.iter().find(|used| used.name == "writes")?;
        let writes = crate::units::parse_amount(&writes.value)? as f64;
        let line = points.line("speed", subject, "");
        let interval = |percent: f64| (percent * writes / 100.0).round().clamp(1.0, writes);
        let line = line.into_iter().map(|(percent, speed)| (interval(percent), speed));
        Some(line.collect::<Vec<_>>()).filter(|line| !line.is_empty())
    }

    fn reading(&self) -> Option<String> {
        let (best, speed, small, slow) = self.buffer()?;
        Some(format!(
            "Reading past the caches runs at {} with buffers of {}, at {} with {}.",
            in_unit(speed, "B/s"),
            bytes(best),
            in_unit(slow, "B/s"),
            bytes(small),
        ))
    }

    fn distance(&self) -> Option<String> {
        let random = self.request("random read 4 KiB")?;
        let ratio = random / self.request("sequential read 4 KiB")?;
        let time = time_ns(random);
        Some(if ratio < FLAT {
            format!(
                "A random read of 4 KiB takes {time}, no longer than a sequential one: there \
                     is no head to move."
            )
        } else {
            let ratio = significant(ratio);
            format!("A random read of 4 KiB takes {time}, {ratio} times a sequential one.")
        })
    }

    fn page(&self) -> Option<String> {
        let (points, subject) = self.real("page-size").or_else(|| self.real("profile"))?;
        Some(match page_of(points, subject)? {
            page if page > 512 => format!(
                "The device works in pages of {}: what begins or ends inside one costs more.",
                bytes(page as f64)
            ),
            _ => "No page shows: writes cost the same wherever they begin, as if a cache lay \
                  before the flash."
                .into(),
        })
    }

    fn durable(&self) -> Option<String> {
        let (durable, plain) =
            (self.request("durable write 4 KiB")?, self.request("random write 4 KiB")?);
        Some(format!(
            "A write of 4 KiB that is durable takes {}, {} times one that is not: {} a second, one \
             after the other.",
            time_ns(durable),
            significant(durable / plain),
            in_unit(1e9 / durable, "").trim(),
        ))
    }

    fn parallel(&self) -> Option<String> {
        let (threads, rate, one) = self.threads()?;
        Some(format!(
            "{threads:.0} writes at the same time reach {}, {} times one at a time; more gain \
             nothing.",
            in_unit(rate, "/s"),
            significant(rate / one),
        ))
    }

    fn syncing(&self) -> Option<String> {
        let line = self.sweep()?;
        let (first, last) = (line.first()?, line.last()?);
        Some(format!(
            "Through the file system, writes of 4 KiB run at {} with an fsync after every {}, at \
             {} without: {} times.",
            in_unit(first.1, "B/s"),
            if first.0 <= 1.0 { "one".into() } else { format!("{:.0}", first.0) },
            in_unit(last.1, "B/s"),
            significant(last.1 / first.1),
        ))
    }

    fn grows(&self) -> Option<(f64, f64)> {
        let (points, subject) = self.real("append-update")?;
        let at = |label| points.named("rate", subject, "", label);
        Some((at("append 4 KiB")?, at("update 4 KiB")?))
    }

    fn growing(&self) -> Option<String> {
        let (append, update) = self.grows()?;
        Some(format!(
            "A durable append of 4 KiB is made {}, a durable update in place {}: growing a file \
             costs {} times as much.",
            in_unit(append, "/s"),
            in_unit(update, "/s"),
            significant(update / append),
        ))
    }

    fn competes(&self) -> Option<(f64, f64, f64)> {
        let (points, subject) = self.real("fs-compete")?;
        let line = points.line("time", subject, "");
        let (first, last) = (line.first()?, line.last()?);
        Some((last.0, last.1, last.1 / first.1))
    }

    fn competing(&self) -> Option<String> {
        let (large, time, ratio) = self.competes()?;
        Some(format!(
            "Ten small fsyncs take {} while another file of {} is made durable: {} times as long \
             as alone.",
            time_ns(time),
            bytes(large),
            significant(ratio),
        ))
    }

    /// A random read in memory, one beyond it, and how large that buffer was.
    fn pages(&self) -> Option<(f64, f64, f64)> {
        let points = self.outcome("mem-bad")?.look();
        let line = points.line("latency", "mem", "random");
        let (first, last) = (line.first()?, line.last()?);
        Some((first.1, last.1, last.0))
    }

    fn paging(&self) -> Option<String> {
        let (near, far, _) = self.pages()?;
        Some(format!(
            "A random read of memory takes {}; of a buffer that memory does not hold {}: {} times.",
            time_ns(near),
            time_ns(far),
            significant(far / near),
        ))
    }

    fn calls(&self) -> Option<String> {
        let points = self.outcome("channel")?.look();
        let at = |series| Some(points.line("time", "mem", series).first()?.1);
        Some(format!(
            "A small request costs {} by system call, {} to a thread that looks for it, {} to \
             one that sleeps.",
            time_ns(at("system call")?),
            time_ns(at("thread, spinning")?),
            time_ns(at("thread, sleeping")?),
        ))
    }

    fn good(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some((best, speed, _, slow)) = self.buffer() {
            lines.push(format!(
                "Read and write large things with buffers from {} on: {} times the smallest.",
                bytes(best),
                significant(speed / slow),
            ));
        }
        if let Some(line) = self.sweep()
            && let Some((_, most)) = line.last().copied()
            && let Some((interval, _)) = line.iter().find(|(_, speed)| *speed >= most / 2.0)
        {
            let last = line.last().is_some_and(|(writes, _)| writes == interval);
            lines.push(if last {
                format!(
                    "Group as many writes as you can before an fsync: even {:.0} of 4 KiB between \
                     two do not reach half of the speed without any.",
                    line.iter().rev().nth(1).map_or(1.0, |(writes, _)| *writes),
                )
            } else {
                format!(
                    "Group writes before an fsync: with {interval:.0} of 4 KiB between two, half \
                     of the speed without any is reached."
                )
            });
        }
        if let Some((threads, rate, one)) = self.threads() {
            lines.push(format!(
                "Keep {threads:.0} requests under way where you have them: {} times one at a time.",
                significant(rate / one)
            ));
        }
        if let Some((points, subject)) = self.real("profile") {
            let page = page_of(points, subject).unwrap_or(0).max(4096);
            lines.push(format!("Write whole multiples of {}, aligned to it.", bytes(page as f64)));
        }
        lines
    }

    fn bad(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some(line) = self.sweep()
            && let (Some(first), Some(last)) = (line.first(), line.last())
        {
            lines.push(format!(
                "An fsync after every write: {} times slower than none.",
                significant(last.1 / first.1)
            ));
        }
        if let Some((near, far, buffer)) = self.pages() {
            lines.push(format!(
                "Random reads of more than memory holds (here a buffer of {}): {} times slower.",
                bytes(buffer),
                significant(far / near),
            ));
        }
        if let (Some(random), Some(sequential)) =
            (self.request("random read 4 KiB"), self.request("sequential read 4 KiB"))
            && random / sequential >= FLAT
        {
            let ratio = significant(random / sequential);
            lines.push(format!("Small random reads: {ratio} times slower than in sequence."));
        }
        if let Some((large, _, ratio)) = self.competes().filter(|(_, _, ratio)| *ratio > 2.0) {
            lines.push(format!(
                "Large fsyncs beside small ones: {} at once make the small ones {} times slower; \
                 make large files durable piece by piece.",
                bytes(large),
                significant(ratio),
            ));
        }
        lines
    }

    fn ugly(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some((points, subject)) = self.real("fs-split") {
            let mean = |series| points.mean("split", subject, series);
            if let (Some(good), Some(ugly), Some(bad)) = (mean("good"), mean("ugly"), mean("bad")) {
                lines.push(format!(
                    "An fsync now and then (5 %): good : ugly : bad = {} : {} : {} of the \
                     throughput.",
                    significant(good),
                    significant(ugly),
                    significant(bad),
                ));
            }
        }
        if let Some((append, update)) = self.grows().filter(|(a, u)| u / a > 1.2) {
            lines.push(format!(
                "A log that grows with each durable record: {} times slower than one whose space \
                 was written before.",
                significant(update / append)
            ));
        }
        if let Some(outcome) = self.outcome("mem-sweep") {
            let line = outcome.look().line("rate", "mem", "");
            if let (Some(first), Some(last)) = (line.first(), line.last()) {
                lines.push(format!(
                    "Runs from random places of paged memory: with {} reads in a row {} times as \
                     many as with {}.",
                    last.0,
                    significant(last.1 / first.1),
                    first.0,
                ));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Sample;

    #[test]
    fn nothing_is_said_of_what_was_not_measured() {
        let mut results = crate::report::tests::empty();
        assert!(words(&results).profile.is_empty() && words(&results).guidance.is_empty());
        let mut outcome = Outcome { name: "parallel".into(), ..Outcome::default() };
        for (threads, rate) in [(1.0, 100.0), (8.0, 700.0), (16.0, 720.0)] {
            outcome.add("model:ssd", &[Sample::at("rate", "", threads, rate * 3.0)]);
            outcome.add("file", &[Sample::at("rate", "", threads, rate)]);
        }
        outcome.settle();
        results.experiments.push(outcome);
        let words = words(&results);
        assert_eq!(words.profile.len(), 1);
        assert!(words.profile[0].starts_with("8 writes at the same time reach 700/s, 7 times"));
        assert_eq!(words.guidance.len(), 1);
    }
}
