//! Medians, spreads and ratios.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// Times of one experiment, by subject, in the order in which subjects were measured first.
#[derive(Debug, Default, Serialize)]
pub struct Times {
    order: Vec<&'static str>,
    seconds: BTreeMap<&'static str, Vec<f64>>,
}

impl Times {
    /// Adds a measurement.
    pub fn add(&mut self, subject: &'static str, time: Duration) {
        if !self.order.contains(&subject) {
            self.order.push(subject);
        }
        self.seconds.entry(subject).or_default().push(time.as_secs_f64());
    }

    fn median(&self, subject: &str) -> Option<f64> {
        let mut times = self.seconds.get(subject)?.clone();
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        match times.len() % 2 {
            0 => Some((times.get(middle.checked_sub(1)?)? + times[middle]) / 2.0),
            _ => times.get(middle).copied(),
        }
    }

    /// How far apart the fastest and the slowest are, as a part of the median.
    fn spread(&self, subject: &str) -> f64 {
        let times = self.seconds.get(subject).map_or(&[][..], Vec::as_slice);
        let min = times.iter().copied().fold(f64::INFINITY, f64::min);
        let max = times.iter().copied().fold(0.0, f64::max);
        self.median(subject).map_or(0.0, |median| (max - min) / median)
    }

    /// A line per subject: median, spread, throughput, and how much faster each is than
    /// every peer (above 1: faster).
    pub fn show(&self, name: &str, bytes: Option<u64>) -> String {
        let mut text = format!("{name}\n");
        for subject in &self.order {
            let Some(median) = self.median(subject) else { continue };
            text += &format!("  {subject:<14} {:>9.1} ms", median * 1e3);
            text += &format!("  spread {:>3.0} %", self.spread(subject) * 100.0);
            if let Some(bytes) = bytes {
                text += &format!("  {:>6.0} MB/s", bytes as f64 / median / 1e6);
            }
            let ratios: Vec<String> = self
                .order
                .iter()
                .filter(|peer| *peer != subject && subject.starts_with("draconis"))
                .filter_map(|peer| {
                    let ratio = self.median(peer)? / median;
                    (!peer.starts_with("draconis")).then(|| format!("{ratio:.2} x {peer}"))
                })
                .collect();
            text += &format!("  {}\n", ratios.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios() {
        let mut times = Times::default();
        for ms in [30, 10, 20] {
            times.add("kernel", Duration::from_millis(ms));
            times.add("draconis", Duration::from_millis(ms / 2));
        }
        assert_eq!(times.median("kernel"), Some(0.02));
        assert!((times.spread("kernel") - 1.0).abs() < 1e-9);
        assert!(times.show("x", None).contains("2.00 x kernel"));
        times.add("kernel", Duration::from_millis(40));
        assert_eq!(times.median("kernel"), Some(0.025));
    }
}
