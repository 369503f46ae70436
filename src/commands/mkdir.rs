//! `draconis mkdir`

use std::process::ExitCode;

use anyhow::bail;
use draconis_exchange::contract::Kind;
use draconis_ext::{Error, Follow, InodeNumber, NewNode, Volume};

use crate::change::{self, Home, Maker};
use crate::cli::Mkdir;
use crate::modes::ModeChange;
use crate::target::Target;

pub fn run(arguments: &Mkdir) -> anyhow::Result<ExitCode> {
    let maker = Maker::new(arguments.owner);
    change::each(arguments.place, &arguments.targets, |volume, target| {
        if arguments.parents {
            return parents(volume, target, maker, arguments.mode.as_ref());
        }
        let home = Home::of(volume, target)?;
        let made = make(volume, home.dir, &home.name, maker, arguments.mode.as_ref());
        made.map(drop).map_err(|error| change::tell(target, error))
    })
}

fn make(
    volume: &Volume,
    dir: InodeNumber,
    name: &[u8],
    maker: Maker,
    mode: Option<&ModeChange>,
) -> draconis_ext::Result<InodeNumber> {
    let usual = 0o777 & !maker.umask;
    // As with `mkdir -m`: changes start from everything.
    let mode = mode.map_or(usual, |mode| mode.apply(0o777, true, maker.umask));
    let new = NewNode {
        kind: Kind::Directory,
        mode,
        uid: maker.uid,
        gid: maker.gid,
        device: (0, 0),
        target: b"",
    };
    volume.create(dir, name, &new)
}

/// Makes what is missing of a path; the mode is for the last of it.
fn parents(
    volume: &Volume,
    target: &Target,
    maker: Maker,
    mode: Option<&ModeChange>,
) -> anyhow::Result<()> {
    let tell = |error| change::tell(target, error);
    let mut at = volume.root();
    let mut names =
        target.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
    while let Some(name) = names.next() {
        let mode = if names.peek().is_none() { mode } else { None };
        at = match volume.resolve(at, name, Follow::Yes) {
            Ok(there) if volume.inode(there)?.kind == Kind::Directory => there,
            Ok(_) => bail!("{target}: a part of it is no directory"),
            Err(Error::NotFound) => make(volume, at, name, maker, mode).map_err(tell)?,
            Err(error) => return Err(tell(error)),
        };
    }
    Ok(())
}
