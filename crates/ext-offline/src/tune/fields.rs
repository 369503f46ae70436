//! Independent superblock fields.

use super::{MAX_RESERVED_PPM, OfflineError, Reserved, Result, TuneChanges};
use crate::format::features::Incompatible;
use crate::format::low32;
use crate::format::superblock::{FLAG_TEST, RawSuperblock, Superblock};

/// Limit of the RAID stride and stripe width in blocks, from the kernel's arithmetic.
const MAX_STRIPE_BLOCKS: u32 = i32::MAX.cast_unsigned();

/// Default mount options of a volume: name, bits, and mask of the bits.
pub const MOUNT_OPTIONS: [(&str, u32, u32); 12] = [
    ("debug", 0x1, 0x1),
    ("bsdgroups", 0x2, 0x2),
    ("user_xattr", 0x4, 0x4),
    ("acl", 0x8, 0x8),
    ("uid16", 0x10, 0x10),
    ("journal_data", 0x20, 0x60),
    ("journal_data_ordered", 0x40, 0x60),
    ("journal_data_writeback", 0x60, 0x60),
    ("nobarrier", 0x100, 0x100),
    ("block_validity", 0x200, 0x200),
    ("discard", 0x400, 0x400),
    ("nodelalloc", 0x800, 0x800),
];

/// Applies the field changes.
pub(super) fn change_fields(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &TuneChanges,
) -> Result<()> {
    if let Some(label) = &changes.label {
        raw.s_volume_name = nul_padded(label, "-L: a label")?;
    }
    if let Some(path) = &changes.last_mounted {
        raw.s_last_mounted = nul_padded(path, "-M: a directory")?;
    }
    if let Some(options) = &changes.mount_options_text {
        raw.s_mount_opts = nul_padded(options, "-E mount_opts: they")?;
    }
    set_reserved_blocks(raw, super_, changes)?;
    match changes.errors {
        None => {}
        Some(errors @ 1..=3) => raw.s_errors = errors.into(),
        Some(_) => return Err(OfflineError::Misuse("-e: continue, remount-ro or panic".into())),
    }
    if let Some(mounts) = changes.max_mounts {
        // Linux also treats 0xFFFF as never.
        raw.s_max_mnt_count = if mounts == 0 { u16::MAX } else { mounts }.into();
    }
    if let Some(mounts) = changes.mounts {
        raw.s_mnt_count = mounts.into();
    }
    if let Some(seconds) = changes.interval_seconds {
        raw.s_checkinterval = seconds.into();
    }
    if let Some(checked) = changes.checked {
        raw.s_lastcheck = low32(checked).into();
        raw.s_lastcheck_hi = u8::try_from(checked >> 32).map_err(|_| {
            OfflineError::Misuse("-T: a time before the year 36812 is needed".into())
        })?;
    }
    for word in &changes.mount_options {
        let (name, on) = word.strip_prefix('^').map_or((word.as_str(), true), |name| (name, false));
        let known = MOUNT_OPTIONS.iter().find(|(known, ..)| *known == name);
        let Some((_, bits, mask)) = known else {
            let names: Vec<_> = MOUNT_OPTIONS.iter().map(|(name, ..)| *name).collect();
            let what = format!("-o {name}: {} are possible", names.join(", "));
            return Err(OfflineError::Misuse(what));
        };
        let others = raw.s_default_mount_opts.get() & !mask;
        raw.s_default_mount_opts = if on { others | bits } else { others }.into();
    }
    if let Some(blocks) = changes.raid_stride {
        raw.s_raid_stride = blocks.into();
    }
    match changes.raid_stripe_blocks {
        Some(blocks) if blocks > MAX_STRIPE_BLOCKS => {
            let what = format!("-E stripe_width: at most {MAX_STRIPE_BLOCKS} blocks");
            return Err(OfflineError::Misuse(what));
        }
        Some(blocks) => raw.s_raid_stripe_width = blocks.into(),
        None => {}
    }
    match changes.hash_algorithm {
        None => {}
        Some(algorithm @ 0..=2) => raw.s_def_hash_version = algorithm,
        Some(_) => return Err(OfflineError::Misuse("-E hash_alg: legacy, half_md4 or tea".into())),
    }
    if changes.force_check {
        raw.mark_errors();
    }
    if let Some(is_for_tests) = changes.is_test_filesystem {
        let others = raw.s_flags.get() & !FLAG_TEST;
        raw.s_flags = if is_for_tests { others | FLAG_TEST } else { others }.into();
    }
    Ok(())
}

fn set_reserved_blocks(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &TuneChanges,
) -> Result<()> {
    let reserved = match changes.reserved {
        None => None,
        Some(Reserved::Ppm(ppm)) if ppm > MAX_RESERVED_PPM => {
            return Err(OfflineError::Misuse("-m: at most 50 percent can be reserved".into()));
        }
        Some(Reserved::Ppm(ppm)) => {
            let blocks = u128::from(super_.blocks).saturating_mul(u128::from(ppm)) / 1_000_000;
            u64::try_from(blocks).ok()
        }
        Some(Reserved::Blocks(blocks)) if blocks > super_.blocks / 2 => {
            let most = super_.blocks / 2;
            return Err(OfflineError::Misuse(format!("-r: at most {most} blocks can be reserved")));
        }
        Some(Reserved::Blocks(blocks)) => Some(blocks),
    };
    if let Some(blocks) = reserved {
        raw.s_r_blocks_count_lo = low32(blocks).into();
        if super_.incompatible.contains(Incompatible::SIXTY_FOUR_BIT) {
            raw.s_r_blocks_count_hi = low32(blocks >> 32).into();
        }
    }
    if let Some(user) = changes.reserved_user {
        raw.s_def_resuid = parse_u16(user, "-u")?.into();
    }
    if let Some(group) = changes.reserved_group {
        raw.s_def_resgid = parse_u16(group, "-g")?.into();
    }
    Ok(())
}

fn parse_u16(number: u32, option: &str) -> Result<u16> {
    u16::try_from(number).map_err(|_| {
        OfflineError::Misuse(format!("{option} {number}: there is room for up to 65535"))
    })
}

/// Pads a text field with NUL.
fn nul_padded<const LEN: usize>(text: &[u8], what: &str) -> Result<[u8; LEN]> {
    let mut field = [0; LEN];
    if text.len() > LEN || text.contains(&0) {
        return Err(OfflineError::Misuse(format!(
            "{what} has at most {LEN} bytes, none of them NUL"
        )));
    }
    field.iter_mut().zip(text).for_each(|(to, byte)| *to = *byte);
    Ok(field)
}
