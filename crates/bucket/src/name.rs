//! Names of objects: a name has all metadata of its object.
//!
//! ```text
//!   epoch/0000002a                     who may write, and who says so
//!   root/0000002a-000000000c           the first and the last sectors, and which objects count
//!   data/0000002a-000000000d-800.40-10c2.8      64 sectors at sector 0x800, 8 at 0x10c2
//! ```
//!
//! Law 1: listed keys are untrusted: an invalid name is ignored.

use std::fmt::Write;

/// Number of an object: the epoch of its writer, and its sequence number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ObjectNumber {
    pub epoch: u32,
    pub sequence: u64,
}

/// A run of sectors.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct SectorRun {
    pub sector: u64,
    pub count: u64,
}

/// Decoded name of an object.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum ObjectName {
    Epoch(u32),
    Root(ObjectNumber),
    Data(ObjectNumber, Vec<SectorRun>),
}

/// Longest name of data, without its folder: file systems allow 255 bytes.
const MAX_NAME_BYTES: usize = 240;
/// Bound of sector numbers, larger than any disk.
pub(crate) const MAX_SECTORS: u64 = 1 << 48;

impl ObjectName {
    pub fn key(&self) -> String {
        match self {
            Self::Epoch(epoch) => format!("epoch/{epoch:08x}"),
            Self::Root(number) => format!("root/{}", number.to_text()),
            Self::Data(number, runs) => {
                let mut key = format!("data/{}", number.to_text());
                for SectorRun { sector, count } in runs {
                    // Writing to a string cannot fail.
                    let _ = write!(key, "-{sector:x}.{count:x}");
                }
                key
            }
        }
    }

    pub fn parse(key: &str) -> Option<Self> {
        let (folder, rest) = key.split_once('/')?;
        let mut parts = rest.split('-');
        let epoch = u32::from_str_radix(parts.next()?, 16).ok()?;
        if folder == "epoch" {
            return parts.next().is_none().then_some(Self::Epoch(epoch));
        }
        let number = ObjectNumber { epoch, sequence: u64::from_str_radix(parts.next()?, 16).ok()? };
        match folder {
            "root" => parts.next().is_none().then_some(Self::Root(number)),
            "data" => {
                let runs: Option<Vec<SectorRun>> = parts.map(parse_run).collect();
                runs.filter(|runs| !runs.is_empty()).map(|runs| Self::Data(number, runs))
            }
            _ => None,
        }
        // One object has one name.
        .filter(|name| name.key() == key)
    }
}

impl ObjectNumber {
    /// Returns the key before those of data objects with this number or, of the same epoch, a later
    /// one.
    pub fn key_before_data(self) -> String {
        format!("data/{}", self.to_text())
    }

    fn to_text(self) -> String {
        format!("{:08x}-{:010x}", self.epoch, self.sequence)
    }
}

fn parse_run(text: &str) -> Option<SectorRun> {
    let (sector, count) = text.split_once('.')?;
    let sector = u64::from_str_radix(sector, 16).ok()?;
    let count = u64::from_str_radix(count, 16).ok()?;
    let is_sane = count > 0 && sector < MAX_SECTORS && count < MAX_SECTORS;
    is_sane.then_some(SectorRun { sector, count })
}

/// Returns true if the name of an object with these runs and one more is short enough.
pub(crate) fn can_append_run(runs: &[SectorRun], more: SectorRun) -> bool {
    let digits = |value: u64| value.max(1).ilog2() as usize / 4 + 1;
    let of = |run: &SectorRun| 2 + digits(run.sector) + digits(run.count);
    19 + runs.iter().map(of).sum::<usize>() + of(&more) <= MAX_NAME_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_names_round_trip() {
        let number = ObjectNumber { epoch: 42, sequence: 13 };
        let runs =
            vec![SectorRun { sector: 0x800, count: 64 }, SectorRun { sector: 0x10c2, count: 8 }];
        for name in
            [ObjectName::Epoch(42), ObjectName::Root(number), ObjectName::Data(number, runs)]
        {
            assert_eq!(ObjectName::parse(&name.key()), Some(name.clone()), "{}", name.key());
        }
        for other in [
            "data/0000002a-000000000d",
            "data/0000002a-000000000d-800",
            "data/0000002a-000000000d-800.0",
            "data/0000002a-000000000d-0800.1",
            "data/2a-d-800.1",
            "data/0000002a-000000000d-800.1#1",
            "data/0000002a-000000000d-ffffffffffffffff.ffffffffffffffff",
            "root/0000002a",
            "epoch/0000002a-1",
            "epoch",
            "",
            "other/0000002a",
        ] {
            assert_eq!(ObjectName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn object_names_sort_by_number() {
        let number = |epoch, nth| ObjectNumber { epoch, sequence: nth };
        let all = [number(1, 2), number(1, 30), number(2, 0), number(20, 1)];
        assert!(all.windows(2).all(|two| two[0] < two[1]));
        assert!(
            all.windows(2)
                .all(|two| ObjectName::Root(two[0]).key() < ObjectName::Root(two[1]).key())
        );
    }

    #[test]
    fn names_fit_length_limit() {
        let run = SectorRun { sector: (1 << 40) - 1, count: 0x2000 };
        let mut runs = vec![];
        while can_append_run(&runs, run) {
            runs.push(run);
        }
        assert!(runs.len() >= 12, "{}", runs.len());
        let key =
            ObjectName::Data(ObjectNumber { epoch: u32::MAX, sequence: (1 << 40) - 1 }, runs).key();
        assert!(key.len() <= "data/".len() + MAX_NAME_BYTES, "{}", key.len());
    }
}
