//! The layout for buckets does what every layout does.

#[test]
fn the_layout_for_buckets_is_a_layout() {
    draconis_objects::layout::conform::check_all(draconis_objects::LayoutKind::Bucket);
}
