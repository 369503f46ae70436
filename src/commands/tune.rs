//! `draconis tune`
//!
//! ```text
//!   image ──alone──▶ confined ──▶ settled ──▶ tuned
//! ```

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use draconis_access::uuid::{self, Identities};
use draconis_ext::format::quota::Kind;
use draconis_ext::tune::{Changes, Error, Reserved, tune};
use draconis_service::volume::part_for_writing;

use crate::change;
use crate::image::{self, Behind, Place};

/// What the kernel does about damage.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Behaviour {
    Continue,
    RemountRo,
    Panic,
}

/// Change what a volume says of itself: label, identity, reserve, features, journal.
///
/// Options are spelled as by tune2fs. Without any, a change of the volume that was cut off is
/// ended. `draconis info` shows what there is.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Label, at most 16 bytes.
    #[arg(short = 'L', value_name = "LABEL")]
    label: Option<OsString>,
    /// Identity: a UUID, `random`, `time`, or `clear`.
    #[arg(short = 'U', value_name = "UUID")]
    uuid: Option<String>,
    /// Percentage of the blocks that is reserved for the superuser.
    #[arg(short = 'm', value_name = "PERCENT")]
    reserved_percent: Option<f64>,
    /// Number of blocks that is reserved for the superuser.
    #[arg(short = 'r', value_name = "BLOCKS", conflicts_with = "reserved_percent")]
    reserved_blocks: Option<u64>,
    /// Features to add, or with a `^` to drop, with commas between them.
    #[arg(short = 'O', value_name = "[^]FEATURE,..", value_delimiter = ',')]
    features: Vec<String>,
    /// Whose quotas are counted, with commas between them: usrquota, grpquota, prjquota; with a `^`
    /// no longer.
    #[arg(short = 'Q', value_name = "[^]KIND,..", value_delimiter = ',')]
    quotas: Vec<String>,
    /// Add a journal, as -O has_journal.
    #[arg(short = 'j')]
    journal: bool,
    /// The journal: `size=` in MiB.
    #[arg(short = 'J', value_name = "size=MIB")]
    journal_options: Option<String>,
    /// More options, with commas between them: mmp_update_interval=SECONDS, how often a host says
    /// that it uses the volume (mmp); clear_mmp, no host does, whatever a tool that was cut off left.
    #[arg(short = 'E', value_name = "OPTIONS", value_delimiter = ',')]
    extended: Vec<String>,
    /// What the kernel does about damage.
    #[arg(short = 'e', value_name = "BEHAVIOUR", value_enum)]
    errors: Option<Behaviour>,
    /// Mounts after which the volume is to be checked; 0 or -1: never.
    #[arg(short = 'c', value_name = "MOUNTS", allow_hyphen_values = true)]
    most_mounts: Option<i32>,
    /// Time after which the volume is to be checked: days, or with d, w, m; 0: never.
    #[arg(short = 'i', value_name = "TIME")]
    interval: Option<String>,
    /// The file or block device.
    image: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shown = arguments.image.display();
    let now = change::now()?;
    let changes = changes(arguments)?;
    let opened = image::writable(&arguments.image)?;
    let behind = Behind::open(&arguments.place.backing)?;
    image::confine()?;
    let part = part_for_writing(opened.start()?, &behind.start(), &arguments.place.options());
    let disk = part.with_context(|| shown.to_string())?.disk;
    if arguments.extended.iter().any(|option| option == "clear_mmp") {
        image::clear(&arguments.image, &disk, now)?;
    }
    let _held = image::settle(&arguments.image, &disk, now)?;
    tune(&*disk, &changes, now).map_err(|error| match error {
        Error::Volume(error) => image::refused(&arguments.image, &*disk, error.into()),
        error => anyhow::Error::from(error).context(shown.to_string()),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn changes(arguments: &Arguments) -> anyhow::Result<Changes> {
    let mut identities = Identities::new(None);
    let uuid = match arguments.uuid.as_deref() {
        None => None,
        Some("random" | "time") => Some(identities.uuid()),
        Some("clear") => Some([0; 16]),
        Some(text) => Some(
            uuid::parse(text)
                .with_context(|| format!("-U {text}: a UUID, random, time or clear is needed"))?,
        ),
    };
    let reserved = match (arguments.reserved_percent, arguments.reserved_blocks) {
        (Some(percent), _) if (0.0..=50.0).contains(&percent) => {
            Some(Reserved::Ppm((percent * 10_000.0).round() as u32))
        }
        (Some(percent), _) => return Err(anyhow!("-m {percent}: 0 to 50 percent are possible")),
        (None, blocks) => blocks.map(Reserved::Blocks),
    };
    let mut features = arguments.features.clone();
    if arguments.journal || arguments.journal_options.is_some() {
        features.push("has_journal".to_owned());
    }
    let size = |text: &str| {
        let mib = text.strip_prefix("size=").and_then(|mib| mib.parse::<u32>().ok());
        mib.with_context(|| format!("-J {text}: size=MIB is possible"))
    };
    let most_mounts = arguments.most_mounts.map(|mounts| match mounts {
        -1 | 0 => Ok(0),
        mounts => u16::try_from(mounts)
            .ok()
            .filter(|it| *it <= 0x7FFF)
            .with_context(|| format!("-c {mounts}: -1 to 32767 mounts are possible")),
    });
    Ok(Changes {
        label: arguments.label.as_ref().map(|label| label.as_bytes().to_vec()),
        uuid,
        reserved,
        errors: arguments.errors.map(|errors| errors as u16 + 1),
        most_mounts: most_mounts.transpose()?,
        interval_seconds: arguments.interval.as_deref().map(interval).transpose()?,
        features,
        quotas: arguments.quotas.iter().map(|word| quota(word)).collect::<anyhow::Result<_>>()?,
        mmp_interval: mmp_interval(&arguments.extended)?,
        journal_mib: arguments.journal_options.as_deref().map(size).transpose()?,
        hash_seed: identities.uuid(),
    })
}

/// A kind of quotas, and whether they are counted.
fn quota(word: &str) -> anyhow::Result<(Kind, bool)> {
    let (name, is_counted) = word.strip_prefix('^').map_or((word, true), |name| (name, false));
    let kind = match name {
        "usrquota" => Kind::User,
        "grpquota" => Kind::Group,
        "prjquota" => Kind::Project,
        _ => bail!("-Q {word}: usrquota, grpquota and prjquota are possible"),
    };
    Ok((kind, is_counted))
}

/// Of `-E`, how often a host says that it uses the volume.
fn mmp_interval(options: &[String]) -> anyhow::Result<Option<u16>> {
    let mut interval = None;
    for option in options {
        match option.split_once('=') {
            None if option == "clear_mmp" => {}
            Some(("mmp_update_interval", seconds)) => {
                let seconds = seconds.parse::<u16>();
                interval =
                    Some(seconds.with_context(|| format!("-E {option}: seconds are needed"))?);
            }
            _ => bail!("-E {option}: mmp_update_interval=SECONDS and clear_mmp are possible"),
        }
    }
    Ok(interval)
}

/// Days, or with a letter weeks or months, in seconds.
fn interval(text: &str) -> anyhow::Result<u32> {
    const DAY: u32 = 86_400;
    let (number, unit) = match text.char_indices().last() {
        Some((at, 'd' | 'D')) => (&text[..at], DAY),
        Some((at, 'w' | 'W')) => (&text[..at], 7 * DAY),
        Some((at, 'm' | 'M')) => (&text[..at], 30 * DAY),
        Some((at, 's' | 'S')) => (&text[..at], 1),
        _ => (text, DAY),
    };
    let seconds = number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    seconds.with_context(|| format!("-i {text}: a time such as 30d, 4w or 6m is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_spelled_as_by_tune2fs() {
        let seconds = |text| interval(text).ok();
        assert_eq!(
            [seconds("0"), seconds("2"), seconds("2d")],
            [Some(0), Some(172_800), Some(172_800)]
        );
        assert_eq!([seconds("1w"), seconds("1m")], [Some(604_800), Some(2_592_000)]);
        assert_eq!([seconds("x"), seconds(""), seconds("99999999w")], [None; 3]);
    }
}
