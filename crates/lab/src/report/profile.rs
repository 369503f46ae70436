//! Results in plain words: ten lines, and recommendations.
//!
//! Law: every sentence is based on a measured number. Differences within the spread of the
//! repetitions lead to no conclusion: the two are "not told apart".

use crate::experiments::{paged, useful};
use crate::results::{Outcome, Points, Range, Results};
use crate::units::{bytes, in_unit, significant, time_ns};

/// Maximum number of lines of the profile.
const LINES: usize = 10;
/// Ratio below which seek distance does not matter.
const FLAT: f64 = 1.3;

/// Profile and recommendations.
pub struct ProfileText {
    /// Description of the machine's storage.
    pub profile: Vec<String>,
    /// Good, bad and ugly practices.
    pub guidance: Vec<(&'static str, Vec<String>)>,
}

/// Derives the texts from the results.
pub fn words(results: &Results) -> ProfileText {
    let all = ProfileRow { results };
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
    ProfileText {
        profile: profile.into_iter().flatten().take(LINES).collect(),
        guidance: guidance.into_iter().filter(|(_, lines)| !lines.is_empty()).collect(),
    }
}

/// Returns `7 times` and the conclusion `then`, or that the two are not told apart.
fn times(one: Range, other: Range, then: &str) -> String {
    match one.times(other) {
        Some(ratio) => format!("{} times{then}", significant(ratio)),
        None => "not told apart".into(),
    }
}

/// Returns the point of a line with the best median.
fn best(line: &[(f64, Range)]) -> Option<(f64, Range)> {
    let medians: Vec<_> = line.iter().map(|(x, range)| (*x, range.median)).collect();
    let (x, _) = useful(&medians)?;
    line.iter().find(|(at, _)| *at == x).copied()
}

struct ProfileRow<'a> {
    results: &'a Results,
}

impl<'a> ProfileRow<'a> {
    fn outcome(&self, name: &str) -> Option<&'a Outcome> {
        self.results.experiments.iter().find(|outcome| outcome.name == name)
    }

    /// Returns an experiment's points and its first real (not modelled) subject.
    fn real(&self, name: &str) -> Option<(Points<'a>, &'a str)> {
        let points = self.outcome(name)?.lookup();
        let subjects = points.subjects();
        let real = subjects.into_iter().find(|s| !s.starts_with("model") && *s != "delay")?;
        Some((points, real))
    }

    fn request(&self, what: &str) -> Option<Range> {
        let (points, subject) = self.real("profile")?;
        points.range("time", subject, "", what)
    }

    /// Returns the best buffer size with its speed, and the smallest size's speed.
    fn buffer(&self) -> Option<(f64, Range, f64, Range)> {
        let (points, subject) = self.real("profile")?;
        let line = points.ranges("read", subject, "");
        let ((best, speed), (small, slow)) = (best(&line)?, *line.first()?);
        Some((best, speed, small, slow))
    }

    fn threads(&self) -> Option<(f64, Range, Range)> {
        let (points, subject) = self.real("parallel").or_else(|| self.real("profile"))?;
        let line = points.ranges("rate", subject, "");
        let ((threads, rate), (_, one)) = (best(&line)?, *line.first()?);
        Some((threads, rate, one))
    }

    /// Returns throughput by writes per fsync, ascending.
    fn sweep(&self) -> Option<Vec<(f64, Range)>> {
        let outcome = self.outcome("fs-sweep")?;
        let (points, subject) = self.real("fs-sweep")?;
        let writes = outcome.parameters.iter().find(|used| used.name == "writes")?;
        let writes = crate::units::parse_amount(&writes.value)? as f64;
        let line = points.ranges("speed", subject, "");
        let interval = |percent: f64| (percent * writes / 100.0).round().clamp(1.0, writes);
        let line = line.into_iter().map(|(percent, speed)| (interval(percent), speed));
        Some(line.collect::<Vec<_>>()).filter(|line| !line.is_empty())
    }

    fn reading(&self) -> Option<String> {
        let (best, speed, small, slow) = self.buffer()?;
        Some(format!(
            "Reading past the caches runs at {} with buffers of {}, at {} with {}: {}.",
            in_unit(speed.median, "B/s"),
            bytes(best),
            in_unit(slow.median, "B/s"),
            bytes(small),
            times(speed, slow, ""),
        ))
    }

    fn distance(&self) -> Option<String> {
        let random = self.request("random read 4 KiB")?;
        let sequential = self.request("sequential read 4 KiB")?;
        let time = time_ns(random.median);
        Some(match random.times(sequential) {
            _ if random.median < FLAT * sequential.median => format!(
                "A random read of 4 KiB takes {time}, no longer than a sequential one: there \
                     is no head to move."
            ),
            Some(ratio) => format!(
                "A random read of 4 KiB takes {time}, {} times a sequential one.",
                significant(ratio)
            ),
            None => format!(
                "A random read of 4 KiB takes {time}, a sequential one {}: not told apart.",
                time_ns(sequential.median)
            ),
        })
    }

    /// Returns the page size, and the times of unaligned and aligned writes.
    fn paged(&self) -> Option<(u64, Range, Range)> {
        let (points, subject) = self.real("page-size").or_else(|| self.real("profile"))?;
        paged(points, subject)
    }

    fn page(&self) -> Option<String> {
        Some(match self.paged()? {
            (..=512, ..) => {
                "No page shows: writes cost the same wherever they begin, as if a cache \
                             lay before the flash."
                    .into()
            }
            (page, inside, aligned) if inside.times(aligned).is_none() => format!(
                "A write that begins inside a page of {} takes {}, an aligned one {}: not told apart.",
                bytes(page as f64),
                time_ns(inside.median),
                time_ns(aligned.median),
            ),
            (page, ..) => format!(
                "The device works in pages of {}: what begins or ends inside one costs more.",
                bytes(page as f64)
            ),
        })
    }

    fn durable(&self) -> Option<String> {
        let (durable, plain) =
            (self.request("durable write 4 KiB")?, self.request("random write 4 KiB")?);
        Some(format!(
            "A write of 4 KiB that is durable takes {}, one that is not {}: {}. That is {} durable \
             ones a second, one after the other.",
            time_ns(durable.median),
            time_ns(plain.median),
            times(durable, plain, ""),
            in_unit(1e9 / durable.median, "").trim(),
        ))
    }

    fn parallel(&self) -> Option<String> {
        let (threads, rate, one) = self.threads()?;
        Some(format!(
            "{threads:.0} writes at the same time reach {}, one at a time {}: {}.",
            in_unit(rate.median, "/s"),
            in_unit(one.median, "/s"),
            times(rate, one, "; more gain nothing"),
        ))
    }

    fn syncing(&self) -> Option<String> {
        let line = self.sweep()?;
        let (first, last) = (line.first()?, line.last()?);
        Some(format!(
            "Through the file system, writes of 4 KiB run at {} with an fsync after every {}, at \
             {} without: {}.",
            in_unit(first.1.median, "B/s"),
            if first.0 <= 1.0 { "one".into() } else { format!("{:.0}", first.0) },
            in_unit(last.1.median, "B/s"),
            times(last.1, first.1, ""),
        ))
    }

    fn grows(&self) -> Option<(Range, Range)> {
        let (points, subject) = self.real("append-update")?;
        let at = |label| points.range("rate", subject, "", label);
        Some((at("append 4 KiB")?, at("update 4 KiB")?))
    }

    fn growing(&self) -> Option<String> {
        let (append, update) = self.grows()?;
        Some(format!(
            "A durable append of 4 KiB is made {}, a durable update in place {}: {}.",
            in_unit(append.median, "/s"),
            in_unit(update.median, "/s"),
            match update.times(append) {
                Some(ratio) if ratio < 1.0 => "growing a file costs no more".into(),
                _ => times(update, append, " as much where a file grows"),
            },
        ))
    }

    /// Returns the size of the other file, and the times of small fsyncs next to it and alone.
    fn competes(&self) -> Option<(f64, Range, Range)> {
        let (points, subject) = self.real("fs-compete")?;
        let line = points.ranges("time", subject, "");
        let (first, last) = (line.first()?, line.last()?);
        Some((last.0, last.1, first.1))
    }

    fn competing(&self) -> Option<String> {
        let (large, beside, alone) = self.competes()?;
        Some(format!(
            "Ten small fsyncs take {} while another file of {} is made durable, alone {}: {}.",
            time_ns(beside.median),
            bytes(large),
            time_ns(alone.median),
            times(beside, alone, ""),
        ))
    }

    /// Returns the times of random reads in and beyond memory, and that buffer's size.
    fn pages(&self) -> Option<(Range, Range, f64)> {
        let points = self.outcome("mem-bad")?.lookup();
        let line = points.ranges("latency", "mem", "random");
        let (first, last) = (line.first()?, line.last()?);
        Some((first.1, last.1, last.0))
    }

    fn paging(&self) -> Option<String> {
        let (near, far, _) = self.pages()?;
        Some(format!(
            "A random read of memory takes {}; of a buffer that memory does not hold {}: {}.",
            time_ns(near.median),
            time_ns(far.median),
            times(far, near, ""),
        ))
    }

    fn calls(&self) -> Option<String> {
        let points = self.outcome("channel")?.lookup();
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
        if let Some((best, speed, _, slow)) = self.buffer()
            && let Some(ratio) = speed.times(slow)
        {
            lines.push(format!(
                "Read and write large things with buffers from {} on: {} times the smallest.",
                bytes(best),
                significant(ratio),
            ));
        }
        if let Some(line) = self.sweep()
            && let (Some((_, least)), Some((_, most))) = (line.first(), line.last())
            && most.times(*least).is_some()
            && let Some((interval, _)) =
                line.iter().find(|(_, speed)| speed.median >= most.median / 2.0)
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
        if let Some((threads, rate, one)) = self.threads()
            && let Some(ratio) = rate.times(one)
        {
            lines.push(format!(
                "Keep {threads:.0} requests under way where you have them: {} times one at a time.",
                significant(ratio)
            ));
        }
        if self.real("profile").is_some() {
            let told = self.paged().filter(|(_, inside, aligned)| inside.times(*aligned).is_some());
            let page = told.map_or(0, |(page, ..)| page).max(4096);
            lines.push(format!("Write whole multiples of {}, aligned to it.", bytes(page as f64)));
        }
        lines
    }

    fn bad(&self) -> Vec<String> {
        let mut lines = vec![];
        if let Some(line) = self.sweep()
            && let (Some(first), Some(last)) = (line.first(), line.last())
            && let Some(ratio) = last.1.times(first.1)
        {
            lines.push(format!(
                "An fsync after every write: {} times slower than none.",
                significant(ratio)
            ));
        }
        if let Some((near, far, buffer)) = self.pages()
            && let Some(ratio) = far.times(near)
        {
            lines.push(format!(
                "Random reads of more than memory holds (here a buffer of {}): {} times slower.",
                bytes(buffer),
                significant(ratio),
            ));
        }
        if let (Some(random), Some(sequential)) =
            (self.request("random read 4 KiB"), self.request("sequential read 4 KiB"))
            && let Some(ratio) = random.times(sequential).filter(|ratio| *ratio >= FLAT)
        {
            let ratio = significant(ratio);
            lines.push(format!("Small random reads: {ratio} times slower than in sequence."));
        }
        if let Some((large, beside, alone)) = self.competes()
            && let Some(ratio) = beside.times(alone).filter(|ratio| *ratio > 2.0)
        {
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
        if let Some((append, update)) = self.grows()
            && let Some(ratio) = update.times(append).filter(|ratio| *ratio > 1.2)
        {
            lines.push(format!(
                "A log that grows with each durable record: {} times slower than one whose space \
                 was written before.",
                significant(ratio)
            ));
        }
        if let Some(outcome) = self.outcome("mem-sweep") {
            let line = outcome.lookup().ranges("rate", "mem", "");
            if let (Some(first), Some(last)) = (line.first(), line.last())
                && let Some(ratio) = last.1.times(first.1)
            {
                lines.push(format!(
                    "Runs from random places of paged memory: with {} reads in a row {} times as \
                     many as with {}.",
                    last.0,
                    significant(ratio),
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
        outcome.finalize();
        results.experiments.push(outcome);
        let words = words(&results);
        assert_eq!(words.profile.len(), 1);
        let said = "8 writes at the same time reach 700/s, one at a time 100/s: 7 times; more";
        assert!(words.profile[0].starts_with(said), "{}", words.profile[0]);
        assert_eq!(words.guidance.len(), 1);
    }

    #[test]
    fn what_the_repetitions_leave_open_is_no_conclusion() {
        let mut results = crate::report::tests::empty();
        let mut outcome = Outcome { name: "parallel".into(), ..Outcome::default() };
        for rates in [[100.0, 300.0], [90.0, 310.0], [250.0, 320.0]] {
            let at = |threads, rate| Sample::at("rate", "", threads, rate);
            outcome.add("file", &[at(1.0, rates[0]), at(8.0, rates[1])]);
        }
        outcome.finalize();
        results.experiments.push(outcome);
        assert_eq!(words(&results).guidance.len(), 1);
        for point in &mut results.experiments[0].points {
            point.values[0] = 305.0;
        }
        let words = words(&results);
        assert!(words.profile[0].ends_with(": not told apart."), "{}", words.profile[0]);
        assert!(words.guidance.is_empty());
    }
}
