//! `draconis touch` and `draconis truncate`

use std::process::ExitCode;

use anyhow::{anyhow, ensure};
use draconis_exchange::contract::{AttributeChange, Kind, SetTime};
use draconis_ext::{Error, Follow, InodeNumber, NewNode, Volume};

use crate::change::{self, Home, Maker};
use crate::cli::{Touch, Truncate};
use crate::target::Target;

pub fn touch(arguments: &Touch) -> anyhow::Result<ExitCode> {
    let maker = Maker::new(None);
    let time = arguments.date.map_or(SetTime::Now, SetTime::To);
    let both = !arguments.access && !arguments.modification;
    let change = AttributeChange {
        accessed: (both || arguments.access).then_some(time),
        modified: (both || arguments.modification).then_some(time),
        ..AttributeChange::default()
    };
    change::each(arguments.place, &arguments.targets, |volume, target| {
        let Some(found) = find_or_make(volume, target, maker, !arguments.no_create)? else {
            return Ok(());
        };
        let done = volume.set_attributes(found, &change);
        done.map(drop).map_err(|error| change::tell(target, error))
    })
}

pub fn truncate(arguments: &Truncate) -> anyhow::Result<ExitCode> {
    let maker = Maker::new(None);
    change::each(arguments.place, &arguments.targets, |volume, target| {
        let Some(found) = find_or_make(volume, target, maker, !arguments.no_create)? else {
            return Ok(());
        };
        let inode = volume.inode(found)?;
        ensure!(inode.kind == Kind::File, "{target}: only files have a length");
        let size = arguments.size.of(inode.size_bytes);
        let size = size.ok_or_else(|| change::tell(target, Error::TooLarge))?;
        let change = AttributeChange { size_bytes: Some(size), ..AttributeChange::default() };
        let done = volume.set_attributes(found, &change);
        done.map(drop).map_err(|error| change::tell(target, error))
    })
}

/// What a target names; an empty file is made if nothing does, and if that is wanted.
fn find_or_make(
    volume: &Volume,
    target: &Target,
    maker: Maker,
    make: bool,
) -> anyhow::Result<Option<InodeNumber>> {
    match volume.resolve(volume.root(), &target.path, Follow::Yes) {
        Ok(found) => return Ok(Some(found)),
        Err(Error::NotFound) if !make => return Ok(None),
        Err(Error::NotFound) => {}
        Err(error) => return Err(change::tell(target, error)),
    }
    ensure!(!target.path.ends_with(b"/"), "{target}: no such directory");
    let home = Home::of(volume, target)?;
    let new = NewNode {
        kind: Kind::File,
        mode: 0o666 & !maker.umask,
        uid: maker.uid,
        gid: maker.gid,
        device: (0, 0),
        target: b"",
    };
    match volume.create(home.dir, &home.name, &new) {
        Ok(made) => Ok(Some(made)),
        // A symbolic link that leads nowhere.
        Err(Error::Exists) => Err(anyhow!("{target}: leads to a file that is not there")),
        Err(error) => Err(change::tell(target, error)),
    }
}

/// A length, or how it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewSize {
    To(u64),
    Longer(u64),
    Shorter(u64),
}

impl NewSize {
    /// The new length of a file that has `old`; `None` beyond 64 bits.
    fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::To(size) => Some(size),
            Self::Longer(by) => old.checked_add(by),
            Self::Shorter(by) => Some(old.saturating_sub(by)),
        }
    }
}

impl std::str::FromStr for NewSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (sign, digits) = match text.as_bytes() {
            [b'+' | b'-', ..] => text.split_at(1),
            _ => ("", text),
        };
        let size = draconis_service::options::parse_size(digits).filter(|_| !digits.is_empty());
        let size = size.ok_or_else(|| format!("{text}: not a size such as 4096, 64K or +1M"))?;
        Ok(match sign {
            "+" => Self::Longer(size),
            "-" => Self::Shorter(size),
            _ => Self::To(size),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_absolute_and_relative() {
        let of = |text: &str, old| text.parse::<NewSize>().map(|size| size.of(old));
        assert_eq!(of("64K", 5), Ok(Some(65536)));
        assert_eq!(
            (of("+1", 5), of("-2", 5), of("-9", 5)),
            (Ok(Some(6)), Ok(Some(3)), Ok(Some(0)))
        );
        assert_eq!(of("+1", u64::MAX), Ok(None));
        assert!(of("", 0).is_err() && of("+", 0).is_err() && of("x", 0).is_err());
    }
}
