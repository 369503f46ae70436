//! Prints figures of the simulated disks beside published figures of real ones.

fn main() {
    println!("{:<52} {:>12} {:>12}", "in virtual time", "published", "model");
    for row in draconis_testkit::sim::measure_models() {
        let far = if row.is_within(0.1) { "" } else { "   more than 10 % off" };
        println!("{row}{far}");
    }
}
