//! Duration estimates of the experiments, measured on a virtual machine with 2 CPUs and a disk
//! that makes 1000 synchronous writes per second. Other machines differ in proportion.

/// Name, seconds of a quick run, seconds of one of the paper's size.
const ESTIMATED_SECONDS: &[(&str, u64, u64)] = &[
    ("seqread", 13, 70),
    ("timeseries", 2, 7),
    ("latency", 1, 4),
    ("caches", 2, 75),
    ("channel", 3, 80),
    ("isolation", 3, 20),
    ("mem-good", 2, 95),
    ("mem-bad", 3, 155),
    ("mem-ugly", 3, 145),
    ("mem-sweep", 4, 140),
    ("mem-split", 5, 185),
    ("fs-good", 1, 1),
    ("fs-bad", 7, 35),
    ("fs-ugly", 1, 3),
    ("fs-sweep", 2, 13),
    ("fs-split", 3, 25),
    ("fs-parts", 1, 4),
    ("fs-compete", 1, 25),
    ("page-size", 1, 11),
    ("write-mode", 1, 25),
    ("parallel", 2, 180),
    ("kv-async", 24, 2250),
    ("kv-sync", 15, 345),
    ("kv-read", 26, 915),
    ("kv-large", 33, 1030),
    ("append-update", 15, 105),
    ("profile", 14, 55),
    ("objects", 40, 245),
    ("mount", 15, 1170),
    ("tools", 8, 385),
    ("killed", 18, 420),
    ("kv-durable", 15, 160),
    ("kv-bucket", 10, 300),
    ("fio-check", 20, 210),
];

/// Returns the estimate for an experiment in seconds; `None` if it was not measured.
pub fn estimated_seconds(name: &str, is_paper: bool) -> Option<u64> {
    let (_, quick, paper) = ESTIMATED_SECONDS.iter().find(|(known, _, _)| *known == name)?;
    Some(if is_paper { *paper } else { *quick })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_has_estimate() {
        let all = || crate::experiments::ALL_EXPERIMENTS.iter().map(|one| one.info().name);
        assert!(all().all(|name| estimated_seconds(name, true).is_some()));
        let quick: u64 = all().filter_map(|name| estimated_seconds(name, false)).sum();
        assert!(quick <= 330, "{quick} s");
    }
}
