//! How long each experiment takes: as measured on 2 CPUs of a virtual machine with a disk
//! that makes a thousand synchronous writes a second; where nobody had the hours, reckoned
//! from parts. Others multiply by their own.

/// Name, seconds of a quick run, seconds of one of the paper's size.
const SECONDS: &[(&str, u64, u64)] = &[
    ("seqread", 13, 70),
    ("timeseries", 2, 10),
    ("latency", 1, 5),
    ("caches", 2, 80),
    ("channel", 3, 70),
    ("isolation", 1, 5),
    ("mem-good", 2, 70),
    ("mem-bad", 3, 120),
    ("mem-ugly", 3, 120),
    ("mem-sweep", 4, 130),
    ("mem-split", 5, 180),
    ("fs-good", 1, 2),
    ("fs-bad", 7, 30),
    ("fs-ugly", 1, 4),
    ("fs-sweep", 2, 15),
    ("fs-split", 3, 70),
    ("fs-parts", 1, 20),
    ("fs-compete", 1, 25),
    ("page-size", 1, 10),
    ("write-mode", 1, 40),
    ("parallel", 2, 220),
    ("kv-async", 24, 3000),
    ("kv-sync", 15, 700),
    ("kv-read", 26, 1800),
    ("kv-large", 33, 900),
    ("append-update", 15, 45),
    ("profile", 14, 60),
    ("objects", 40, 1600),
    ("mount", 15, 1000),
    ("tools", 12, 320),
    ("kv-durable", 15, 25),
    ("fio-check", 20, 120),
];

/// Seconds of a run of the named experiment; `None` if nobody measured it.
pub fn seconds(name: &str, is_paper: bool) -> Option<u64> {
    let (_, quick, paper) = SECONDS.iter().find(|(known, _, _)| *known == name)?;
    Some(if is_paper { *paper } else { *quick })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_known_and_a_quick_run_is_quick() {
        let all = || crate::experiments::ALL.iter().map(|one| one.about().name);
        assert!(all().all(|name| seconds(name, true).is_some()));
        let quick: u64 = all().filter_map(|name| seconds(name, false)).sum();
        assert!(quick <= 300, "{quick} s");
    }
}
