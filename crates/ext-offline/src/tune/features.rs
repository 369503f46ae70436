//! Features that are added or removed in place, and the work that each needs.

use super::{OfflineError, Result, TuneChanges, TuneWork, checksum_seed};
use crate::format::casefold::UTF8;
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::quota::QuotaType;
use crate::format::requirements::{Enforcer, Feature, FeatureRule, violated_rules};
use crate::format::superblock::{CHECKSUM_CRC32C, RawSuperblock, Superblock};
use crate::mkfs::ENCRYPTION_MODES;

/// Log2 of the groups per flex group if `flex_bg` is added: 16 groups.
const FLEX_GROUPS_LOG: u8 = 4;
/// `half_md4`.
const DEFAULT_HASH_VERSION: u8 = 1;

/// Adds and drops features.
pub(super) fn change_features(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &TuneChanges,
    work: &mut TuneWork,
) -> Result<()> {
    let is_added = |name: &String| name == "has_journal";
    let adds_journal = changes.features.iter().any(is_added);
    if changes.journal_mib.is_some() && !adds_journal {
        return Err(OfflineError::Misuse("-J size: needs -j or -O has_journal".to_owned()));
    }
    for word in &changes.features {
        let (name, on) = match word.strip_prefix('^') {
            Some(name) => (name, false),
            None => (word.as_str(), true),
        };
        let feature = Feature::from_name(name);
        let feature =
            feature.ok_or_else(|| OfflineError::Misuse(format!("-O {name}: no such feature")))?;
        if feature.is_enabled_in(raw) == on {
            continue;
        }
        match on {
            true => add_feature(raw, super_, feature, name, changes, work)?,
            false => remove_feature(raw, super_, feature, name, work)?,
        }
        feature.set(raw, on);
    }
    let has = |feature: Feature| feature.is_enabled_in(raw);
    let bytes = super_.inode_bytes;
    let was_broken = |rule: &FeatureRule| {
        violated_rules(Enforcer::Maker, super_.features(), bytes).any(|it| it == *rule)
    };
    let rule =
        violated_rules(Enforcer::Maker, raw.features(), bytes).find(|rule| !was_broken(rule));
    if let Some(rule) = rule {
        return Err(OfflineError::Misuse(format!("-O {rule}")));
    }
    let orphans = Feature::C(Compatible::ORPHAN_FILE);
    let had = super_.compatible.contains(Compatible::ORPHAN_FILE);
    work.system_files.orphans = (has(orphans) != had).then(|| has(orphans));
    work.system_files.quotas = quota_changes(raw, super_, changes)?;
    Ok(())
}

/// Returns the quota types to track after the change, if they differ.
fn quota_changes(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &TuneChanges,
) -> Result<Option<[bool; 3]>> {
    let feature = Feature::R(ReadOnlyCompatible::QUOTA);
    let has_projects = Feature::R(ReadOnlyCompatible::PROJECT).is_enabled_in(raw);
    let had = super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA);
    let there = super_.quotas.map(|inode| had && inode != 0);
    let mut wanted = match (had, feature.is_enabled_in(raw)) {
        (false, true) => [true, true, has_projects],
        (true, false) => [false; 3],
        (true, true) if has_projects => {
            let [users, groups, _] = there;
            [users, groups, true]
        }
        _ => there,
    };
    let [users, groups, projects] = &mut wanted;
    for (kind, is_wanted) in &changes.quotas {
        match kind {
            QuotaType::User => *users = *is_wanted,
            QuotaType::Group => *groups = *is_wanted,
            QuotaType::Project => *projects = *is_wanted,
        }
    }
    if *projects && !has_projects {
        return Err(OfflineError::Misuse("-Q prjquota: needs project (-O)".to_owned()));
    }
    feature.set(raw, wanted.contains(&true));
    Ok((wanted != there).then_some(wanted))
}

fn add_feature(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    feature: Feature,
    name: &str,
    changes: &TuneChanges,
    work: &mut TuneWork,
) -> Result<()> {
    match feature {
        Feature::C(Compatible::HAS_JOURNAL) => work.journal = Some(true),
        Feature::C(Compatible::DIR_INDEX) => {
            if raw.s_hash_seed.iter().all(|word| word.get() == 0) {
                let seed = changes.hash_seed.as_chunks::<4>().0;
                for (to, from) in raw.s_hash_seed.iter_mut().zip(seed) {
                    *to = u32::from_le_bytes(*from).into();
                }
            }
            if raw.s_def_hash_version == 0 {
                raw.s_def_hash_version = DEFAULT_HASH_VERSION;
            }
        }
        Feature::C(Compatible::STABLE_INODES)
        | Feature::I(Incompatible::EXTENTS | Incompatible::LARGEDIR)
        | Feature::R(
            ReadOnlyCompatible::LARGE_FILE
            | ReadOnlyCompatible::HUGE_FILE
            | ReadOnlyCompatible::DIR_NLINK
            | ReadOnlyCompatible::VERITY
            | ReadOnlyCompatible::PROJECT
            | ReadOnlyCompatible::READONLY,
        ) => {}
        Feature::R(ReadOnlyCompatible::METADATA_CSUM) => {
            // Descriptors have one checksum or the other.
            Feature::R(ReadOnlyCompatible::GDT_CSUM).set(raw, false);
            raw.s_checksum_type = CHECKSUM_CRC32C;
            work.rewrites_checksums = true;
        }
        Feature::I(Incompatible::FLEX_BG) => {
            if raw.s_log_groups_per_flex == 0 {
                raw.s_log_groups_per_flex = FLEX_GROUPS_LOG;
            }
        }
        Feature::I(Incompatible::MMP) => work.mmp = Some(true),
        Feature::R(ReadOnlyCompatible::QUOTA) | Feature::C(Compatible::ORPHAN_FILE) => {}
        Feature::I(Incompatible::EA_INODE) if super_.inode_bytes >= 128 => {}
        Feature::I(Incompatible::CASEFOLD) => {
            (raw.s_encoding, raw.s_encoding_flags) = (UTF8.into(), 0.into());
        }
        Feature::I(Incompatible::ENCRYPT) => {
            let [contents, names, ..] = &mut raw.s_encrypt_algos;
            (*contents, *names) = ENCRYPTION_MODES;
        }
        Feature::I(Incompatible::CSUM_SEED) => {
            raw.s_checksum_seed = checksum_seed(&super_.uuid).into();
            raw.s_checksum_type = CHECKSUM_CRC32C;
        }
        _ => {
            return Err(OfflineError::Unsupported(format!(
                "-O {name}: not added in place here; tune2fs -O {name} and e2fsck -f may do it"
            )));
        }
    }
    Ok(())
}

fn remove_feature(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    feature: Feature,
    name: &str,
    work: &mut TuneWork,
) -> Result<()> {
    match feature {
        Feature::C(Compatible::HAS_JOURNAL) => {
            if super_.journal_device != 0 {
                let what = "-O ^has_journal: the journal is on another device; use tune2fs";
                return Err(OfflineError::Unsupported(what.to_owned()));
            }
            Feature::C(Compatible::FAST_COMMIT).set(raw, false);
            work.journal = Some(false);
        }
        Feature::R(ReadOnlyCompatible::READONLY | ReadOnlyCompatible::QUOTA)
        | Feature::C(Compatible::ORPHAN_FILE) => {}
        Feature::I(Incompatible::MMP) => work.mmp = Some(false),
        Feature::C(Compatible::RESIZE_INODE) => {
            raw.s_reserved_gdt_blocks = 0.into();
            work.frees_reserved_gdt = true;
        }
        Feature::C(Compatible::DIR_INDEX) => work.drops_indexes = true,
        Feature::R(ReadOnlyCompatible::METADATA_CSUM) => {
            // Keeps the uninitialized flags of groups valid.
            Feature::R(ReadOnlyCompatible::GDT_CSUM).set(raw, true);
            Feature::I(Incompatible::CSUM_SEED).set(raw, false);
            raw.s_checksum_seed = 0.into();
            raw.s_checksum_type = 0;
            raw.s_checksum = 0.into();
            if super_.incompatible.contains(Incompatible::EA_INODE)
                && super_.incompatible.contains(Incompatible::CSUM_SEED)
            {
                let what = "-O ^metadata_csum: values of attributes in inodes are hashed with \
                            its seed";
                return Err(OfflineError::Unsupported(what.to_owned()));
            }
            work.rewrites_checksums = true;
        }
        Feature::I(Incompatible::CSUM_SEED) => {
            let is_of_uuid = raw.s_checksum_seed.get() == checksum_seed(&super_.uuid);
            if !is_of_uuid && super_.incompatible.contains(Incompatible::EA_INODE) {
                let what = "-O ^metadata_csum_seed: values of attributes in inodes are hashed \
                            with it";
                return Err(OfflineError::Unsupported(what.to_owned()));
            }
            work.rewrites_checksums |= !is_of_uuid;
            raw.s_checksum_seed = 0.into();
        }
        _ => {
            return Err(OfflineError::Unsupported(format!(
                "-O ^{name}: not dropped in place here; tune2fs -O ^{name} and e2fsck -f may do it"
            )));
        }
    }
    Ok(())
}
