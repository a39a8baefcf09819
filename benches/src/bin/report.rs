//! Merges the rows of all bench programs into `target/bench.json` and prints them.

use std::error::Error;
use std::fs;

use pie_benches::conditions::Machine;
use pie_benches::report::{self, Row};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = report::folder();
    let rows = report::read(&folder)?;
    report::write_medians(&folder, &rows)?;
    let text = text(&rows);
    fs::write(folder.with_extension("txt"), &text)?;
    print!("{text}");
    Ok(())
}

/// The machine, what makes rows invalid, the table.
fn text(rows: &[Row]) -> String {
    let warnings = rows.iter().flat_map(Row::warnings);
    let warnings: String = warnings
        .flat_map(|text| ["warning: ".to_owned(), text, "\n".to_owned()])
        .collect();
    let (machine, table) = (Machine::now(), report::table(rows));
    format!("{machine}\n{warnings}{table}\n")
}
