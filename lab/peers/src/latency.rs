//! Latency histograms of many operations in a few kilobytes.
//!
//! ```text
//!   0 1 2 .. 63 | 64 66 68 .. 126 | 128 132 .. 252 | ...     32 buckets to a doubling
//! ```
//!
//! The width of a bucket is at most 1/32 of its value, so quantiles are accurate to 3 %.

use serde::Serialize;

/// Buckets per power of two.
const BUCKETS_PER_POWER_OF_TWO: u64 = 32;
/// Number of buckets; they cover all 64-bit numbers.
const BUCKET_COUNT: usize = (60 * BUCKETS_PER_POWER_OF_TWO) as usize;

/// A histogram of durations.
#[derive(Clone, Debug)]
pub struct LatencyHistogram {
    counts: Vec<u64>,
    total: u64,
    sum_ns: u64,
    max_ns: u64,
}

/// Quantiles and outliers of a histogram.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct LatencyQuantiles {
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 90 % quantile.
    pub p90_ns: u64,
    /// 99 % quantile.
    pub p99_ns: u64,
    /// 99.9 % quantile.
    pub p999_ns: u64,
    /// 99.99 % quantile.
    pub p9999_ns: u64,
    /// Maximum.
    pub max_ns: u64,
    /// Share of operations slower than ten times the median.
    pub slow: f64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKET_COUNT], total: 0, sum_ns: 0, max_ns: 0 }
    }
}

fn bucket_index(ns: u64) -> usize {
    let shift = (ns | 1).ilog2().saturating_sub(BUCKETS_PER_POWER_OF_TWO.ilog2());
    (u64::from(shift) * BUCKETS_PER_POWER_OF_TWO + (ns >> shift)) as usize
}

/// Returns the middle of a bucket.
fn bucket_midpoint(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket / BUCKETS_PER_POWER_OF_TWO).saturating_sub(1);
    let least = (bucket - shift * BUCKETS_PER_POWER_OF_TWO) << shift;
    least + ((1 << shift) >> 1)
}

impl LatencyHistogram {
    /// Adds a duration.
    pub fn record_ns(&mut self, ns: u64) {
        self.counts[bucket_index(ns)] += 1;
        self.total += 1;
        self.sum_ns += ns;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds the histogram of another thread.
    pub fn merge(&mut self, other: &Self) {
        for (own, more) in self.counts.iter_mut().zip(&other.counts) {
            *own += more;
        }
        self.total += other.total;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the sum of all durations, in seconds.
    pub fn total_seconds(&self) -> f64 {
        self.sum_ns as f64 / 1e9
    }

    fn quantile(&self, part: f64) -> u64 {
        let rank = ((self.total as f64 * part).ceil() as u64).max(1);
        let mut seen = 0;
        for (nth, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return bucket_midpoint(nth).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// Returns quantiles and outliers.
    pub fn quantiles(&self) -> LatencyQuantiles {
        let p50_ns = self.quantile(0.5);
        let slow: u64 = self.counts.iter().skip(bucket_index(p50_ns * 10) + 1).sum();
        LatencyQuantiles {
            p50_ns,
            p90_ns: self.quantile(0.9),
            p99_ns: self.quantile(0.99),
            p999_ns: self.quantile(0.999),
            p9999_ns: self.quantile(0.9999),
            max_ns: self.max_ns,
            slow: slow as f64 / self.total.max(1) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_width_is_bounded() {
        for ns in (0..100_000).chain([1 << 40, u64::MAX / 2, u64::MAX]) {
            let off = bucket_midpoint(bucket_index(ns)).abs_diff(ns);
            assert!(
                off <= ns / BUCKETS_PER_POWER_OF_TWO,
                "{ns} became {}",
                bucket_midpoint(bucket_index(ns))
            );
        }
    }

    #[test]
    fn quantiles_of_thousand_values() {
        let mut all = LatencyHistogram::default();
        (1..=999).for_each(|ms| all.record_ns(ms * 1000));
        let mut one = LatencyHistogram::default();
        one.record_ns(100_000_000);
        all.merge(&one);
        let told = all.quantiles();
        assert!(told.p50_ns.abs_diff(500_000) < 16_000, "{told:?}");
        assert!(told.p99_ns.abs_diff(990_000) < 31_000, "{told:?}");
        assert_eq!((told.max_ns, told.slow), (100_000_000, 0.001));
    }
}
