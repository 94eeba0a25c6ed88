//! Plots, as SVG.

pub(crate) mod lines;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::figures::{median, range};

/// A bar: the median of several rounds, with their minimum and maximum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bar {
    /// Its height.
    pub(crate) median: f64,
    /// The lower end of its whisker.
    pub(crate) least: f64,
    /// The upper end of its whisker.
    pub(crate) most: f64,
}

impl Bar {
    /// Makes a bar of the figures of several rounds.
    pub(crate) fn of(rounds: &[f64]) -> Self {
        let (least, most) = range(rounds.iter().copied());
        Bar { median: median(rounds.iter().copied()), least, most }
    }
}

/// Height of the title and the legend below it.
const HEADING: u32 = 58;
/// The font of all text.
const FONT: &str = "sans-serif";
const GREY: RGBColor = RGBColor(110, 110, 110);
/// Colours that are distinguishable with colour blindness (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(153, 153, 153),
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
];

/// Draws the title, and the legend.
fn draw_heading(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    series: &[String],
) -> Result<()> {
    let style = (FONT, 18).into_font().color(&BLACK);
    area.draw_text(title, &style, (12, 8)).map_err(failed)?;
    let mut x = 14;
    for (series, name) in series.iter().enumerate() {
        let colour = COLOURS[series % COLOURS.len()];
        let corners = [(x, 38), (x + 12, 50)];
        area.draw(&Rectangle::new(corners, colour.filled())).map_err(failed)?;
        let style = (FONT, 13).into_font().color(&GREY);
        area.draw_text(name, &style, (x + 17, 37)).map_err(failed)?;
        // The width is an estimate, as the font is unknown.
        x += 32 + 7 * name.chars().count() as i32;
    }
    Ok(())
}

fn failed(error: DrawingAreaErrorKind<std::io::Error>) -> anyhow::Error {
    anyhow!("{error}")
}

/// Three digits, thousands and millions by letter.
fn short(value: f64) -> String {
    let (scaled, letter) = match value.abs() {
        1e6.. => (value / 1e6, "M"),
        1e4.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    let text = format!("{scaled:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let of = |value| short(value);
        assert_eq!([of(0.0), of(1.25), of(99_108.0)], ["0", "1.25", "99.1k"]);
        assert_eq!([of(2_500_000.0), of(-0.1), of(100.0)], ["2.5M", "-0.1", "100"]);
    }
}
