//! Random valid combinations of features.

use draconis_device::Random;

/// Features that combine with all others on ext4.
const INDEPENDENT_FEATURES: &[&str] = &[
    "inline_data",
    "ea_inode",
    "large_dir",
    "orphan_file",
    "encrypt",
    "stable_inodes",
    "verity",
    "fast_commit",
    "^dir_index",
    "^extra_isize",
    "^huge_file",
    "^dir_nlink",
    "^flex_bg",
    "^ext_attr",
    "^large_file",
    "sparse_super2",
];

/// Returns a line as in the table.
pub fn random_combination(random: &mut Random) -> String {
    let mut one_of =
        |choices: &[&'static str]| choices[random.next_below(choices.len() as u64) as usize];
    let block: u32 = one_of(&["1024", "1024", "2048", "4096", "4096"]).parse().unwrap();
    let inode = one_of(&["256", "256", "512", "1024"]);
    let mut features = vec![];
    // Block maps, and descriptor size.
    features.extend(one_of(&["", "", "^64bit", "^extent,^64bit"]).split(',').map(str::to_owned));
    features.push(
        one_of(&["", "", "metadata_csum_seed", "^metadata_csum", "^metadata_csum,uninit_bg"])
            .to_owned(),
    );
    features.push(one_of(&["", "", "^resize_inode", "meta_bg,^resize_inode"]).to_owned());
    features.push(one_of(&["", "", "", "^has_journal"]).to_owned());
    let by_extents = !features.iter().any(|it| it == "^extent");
    let mut cluster = String::new();
    if by_extents && one_of(&["", "", "", "clusters"]) == "clusters" {
        features.push("bigalloc".into());
        let times: u32 = one_of(&["2", "4", "16"]).parse().unwrap();
        cluster = format!(" -C {}", block * times);
    }
    for feature in INDEPENDENT_FEATURES {
        if one_of(&["", "", "", "yes"]) == "yes" {
            features.push((*feature).to_owned());
        }
    }
    let journal = !features.iter().any(|it| it == "^has_journal");
    let needs_journal = ["fast_commit", "orphan_file"];
    features.retain(|it| !it.is_empty() && (journal || !needs_journal.contains(&it.as_str())));
    // e2fsck 1.47.0 never agrees with itself about quotas of clusters.
    let after = match cluster.as_str() {
        "" => one_of(&["", "", "", " | -O quota", " | -O project"]),
        _ => "",
    };
    let features =
        if features.is_empty() { String::new() } else { format!(" -O {}", features.join(",")) };
    format!("-t ext4 -b {block} -I {inode}{features}{cluster}{after}")
}
