//! Writes the first inputs of every target, or of the named one: `cargo run --example seeds -- DIRECTORY`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let directory = std::env::args().nth(1).unwrap_or_else(|| "seeds".into());
    for (target, _) in pie_fuzz::TARGETS {
        let directory = Path::new(&directory).join(target);
        std::fs::create_dir_all(&directory)?;
        for (number, seed) in pie_fuzz::seeds::of(target).into_iter().enumerate() {
            std::fs::write(directory.join(number.to_string()), seed)?;
        }
    }
    Ok(())
}
