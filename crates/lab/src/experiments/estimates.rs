//! How long each experiment takes: as measured on 2 CPUs of a virtual machine with a disk
//! that makes a thousand synchronous writes a second. Others multiply by their own.

/// Name, seconds of a quick run, seconds of one of the paper's size.
const SECONDS: &[(&str, u64, u64)] = &[
    ("seqread", 13, 0),
    ("timeseries", 2, 0),
    ("latency", 1, 0),
    ("caches", 2, 0),
    ("channel", 3, 0),
    ("isolation", 1, 0),
    ("mem-good", 2, 0),
    ("mem-bad", 3, 0),
    ("mem-ugly", 3, 0),
    ("mem-sweep", 4, 0),
    ("mem-split", 5, 0),
    ("fs-good", 1, 0),
    ("fs-bad", 7, 0),
    ("fs-ugly", 1, 0),
    ("fs-sweep", 2, 0),
    ("fs-split", 3, 0),
    ("fs-parts", 1, 0),
    ("fs-compete", 1, 0),
    ("page-size", 1, 0),
    ("write-mode", 1, 0),
    ("parallel", 2, 0),
    ("kv-async", 24, 0),
    ("kv-sync", 15, 0),
    ("kv-read", 26, 0),
    ("kv-large", 33, 0),
    ("append-update", 15, 0),
    ("profile", 2, 0),
    ("objects", 40, 0),
    ("mount", 14, 0),
    ("tools", 12, 0),
    ("kv-durable", 15, 0),
    ("fio-check", 20, 0),
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
        let all = || crate::experiments::ALL.iter().map(|one| one.name());
        assert!(all().all(|name| seconds(name, true).is_some()));
        let quick: u64 = all().filter_map(|name| seconds(name, false)).sum();
        assert!(quick <= 300, "{quick} s");
    }
}
