//! `draconis truncate`

use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use draconis_ext::Error;
use draconis_types::{AttributeChange, FileType};

use crate::edit::{self, NewFileOwner};
use crate::image::WriteArgs;
use crate::target::ImagePath;

/// Shrink or extend files in a volume, creating missing files.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// New size, or a change: 64K, +1M, -100.
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    size: NewSize,
    /// Do not create files.
    #[arg(short = 'c', long)]
    no_create: bool,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let maker = NewFileOwner::new(None);
    edit::for_each_target(&arguments.place, &arguments.targets, |volume, target| {
        let Some(found) = edit::find_or_create(volume, target, maker, !arguments.no_create)? else {
            return Ok(());
        };
        let inode = volume.inode(found)?;
        ensure!(inode.kind == FileType::File, "{target}: only files have a length");
        let size = arguments.size.resolve_size(inode.size_bytes);
        let size = size.ok_or_else(|| edit::with_context(target, Error::TooLarge))?;
        let change = AttributeChange { size_bytes: Some(size), ..AttributeChange::default() };
        let done = volume.set_attributes(found, &change);
        done.map(drop).map_err(|error| edit::with_context(target, error))
    })
}

/// A length, absolute or relative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewSize {
    To(u64),
    Longer(u64),
    Shorter(u64),
}

impl NewSize {
    /// Returns the new length of a file of length `old`; `None` if it exceeds 64 bits.
    fn resolve_size(self, old: u64) -> Option<u64> {
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
    fn absolute_and_relative_sizes_are_parsed() {
        let of = |text: &str, old| text.parse::<NewSize>().map(|size| size.resolve_size(old));
        assert_eq!(of("64K", 5), Ok(Some(65536)));
        assert_eq!(
            (of("+1", 5), of("-2", 5), of("-9", 5)),
            (Ok(Some(6)), Ok(Some(3)), Ok(Some(0)))
        );
        assert_eq!(of("+1", u64::MAX), Ok(None));
        assert!(of("", 0).is_err() && of("+", 0).is_err() && of("x", 0).is_err());
    }
}
