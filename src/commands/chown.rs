//! `draconis chown`

use std::process::ExitCode;

use clap::Args;
use draconis_ext::{Follow, Inode, Volume};
use draconis_types::{AttributeChange, FileType};

use crate::edit;
use crate::image::WriteArgs;
use crate::target::ImagePath;

/// Change file owners in a volume.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Arguments {
    /// Print help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Change directories recursively without following symbolic links.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Change symbolic links themselves.
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// New owner: UID, UID:GID or :GID.
    owner: NewOwner,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

const SETUID_BIT: u32 = 0o4000;
const SETGID_BIT: u32 = 0o2000;

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let change = |volume: &Volume, inode: &Inode| {
        let old = volume.attributes_of(inode).mode;
        // Clears setuid and setgid, so that no program runs with the rights of its new owner.
        let executable_by_group = if old & 0o010 != 0 { SETGID_BIT } else { 0 };
        let kept = old & 0o7777 & !(SETUID_BIT | executable_by_group);
        let mode = (inode.kind == FileType::File && kept != old & 0o7777).then_some(kept);
        let NewOwner { uid, gid } = arguments.owner;
        Some(AttributeChange { mode, uid, gid, ..AttributeChange::default() })
    };
    let follow = if arguments.no_dereference { Follow::No } else { Follow::Yes };
    edit::for_each_target(&arguments.place, &arguments.targets, |volume, target| {
        edit::change_attributes(volume, target, arguments.recursive, follow, &change)
    })
}

/// Numeric `OWNER`, `OWNER:GROUP`, `OWNER:` or `:GROUP`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewOwner {
    uid: Option<u32>,
    gid: Option<u32>,
}

impl std::str::FromStr for NewOwner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (uid, gid) = text.split_once(':').unwrap_or((text, ""));
        let number = |text: &str| -> Result<Option<u32>, String> {
            if text.is_empty() {
                return Ok(None);
            }
            let number = text.parse().map_err(|_| match text.bytes().all(|b| b.is_ascii_digit()) {
                true => format!("{text}: owners are numbers up to {}", u32::MAX),
                false => format!(
                    "{text}: names are this machine's, not the volume's: a number is needed"
                ),
            });
            number.map(Some)
        };
        let owner = Self { uid: number(uid)?, gid: number(gid)? };
        if owner == (Self { uid: None, gid: None }) {
            return Err("OWNER, OWNER:GROUP or :GROUP is needed".to_string());
        }
        Ok(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_arguments_are_parsed() {
        let owner = |uid, gid| Ok(NewOwner { uid, gid });
        assert_eq!("7".parse(), owner(Some(7), None));
        assert_eq!("7:8".parse(), owner(Some(7), Some(8)));
        assert_eq!(":8".parse(), owner(None, Some(8)));
        assert_eq!("7:".parse(), owner(Some(7), None));
        for wrong in ["", ":", "root", "1:wheel", "1:2:3"] {
            assert!(wrong.parse::<NewOwner>().is_err(), "{wrong}");
        }
    }
}
