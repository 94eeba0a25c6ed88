//! Horizontal figures in groups, one below the other, with room for long names and labels.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Bar, COLOURS, FONT, GREY, HEADING, draw_heading, failed, short};

/// The plot.
#[derive(Debug, Clone)]
pub(crate) struct Lines {
    /// The title.
    pub(crate) title: String,
    /// The meaning of the length, with its unit.
    pub(crate) unit: String,
    /// The scale.
    pub(crate) scale: Scale,
    /// The names of the lines in each group.
    pub(crate) series: Vec<String>,
    /// Groups, from the top.
    pub(crate) groups: Vec<Group>,
}

/// Maps figures to positions.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Scale {
    /// From 0 to this; longer figures are cut off.
    Linear(f64),
    /// Logarithmic, between two powers of ten.
    Decades(i32, i32),
}

/// Lines that belong together.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    /// The group's name.
    pub(crate) name: String,
    /// One per series, or none.
    pub(crate) lines: Vec<Option<Line>>,
    /// The limit of a goal.
    pub(crate) goal: Option<f64>,
}

/// A figure of one series.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// The drawing.
    pub(crate) mark: Mark,
    /// The text beside it.
    pub(crate) label: String,
}

/// How a figure is drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Mark {
    /// A bar from zero.
    Bar(Bar),
    /// A line from a filled dot to an empty one.
    Span(f64, f64),
}

/// The plot's width, and where its figures begin and end.
const WIDTH: u32 = 900;
const LEFT: i32 = 225;
const RIGHT: i32 = 760;
/// Height of a line, and space between groups.
const LINE: i32 = 19;
const GAP: i32 = 16;
/// Height below the groups.
const FOOT: i32 = 52;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Lines {
    /// Draws it into `file`.
    pub(crate) fn draw(&self, file: &Path) -> Result<()> {
        let height = HEADING as i32 + self.height() + FOOT;
        let root = SVGBackend::new(file, (WIDTH, height as u32)).into_drawing_area();
        self.draw_on(&root)
            .and_then(|()| root.present().map_err(|error| anyhow!("{error}")))
            .with_context(|| format!("drawing {}", file.display()))
    }

    /// Height of all groups.
    fn height(&self) -> i32 {
        self.groups.len() as i32 * self.group_height()
    }

    fn group_height(&self) -> i32 {
        self.series.len() as i32 * LINE + GAP
    }

    fn draw_on(&self, root: &Area<'_>) -> Result<()> {
        root.fill(&WHITE).map_err(failed)?;
        let (heading, body) = root.split_vertically(HEADING);
        draw_heading(&heading, &self.title, &self.series)?;
        self.draw_axis(&body)?;
        for (i, group) in (0..).zip(&self.groups) {
            let top = i * self.group_height() + GAP / 2;
            let middle = top + self.series.len() as i32 * LINE / 2;
            let name = text(14, BLACK, HPos::Right);
            body.draw_text(&group.name, &name, (LEFT - 12, middle)).map_err(failed)?;
            for (series, line) in (0..).zip(&group.lines) {
                let Some(line) = line else { continue };
                let colour = COLOURS[series as usize % COLOURS.len()];
                let y = top + series * LINE + LINE / 2;
                let end = self.draw_mark(&body, line.mark, y, colour)?;
                let label = text(13, BLACK, HPos::Left);
                let x = self.beside(end, &line.label, group.goal);
                body.draw_text(&line.label, &label, (x, y)).map_err(failed)?;
            }
            if let Some(goal) = group.goal {
                let x = self.place(goal);
                let ends = vec![(x, top - 3), (x, top + self.series.len() as i32 * LINE + 3)];
                let style = RGBColor(213, 94, 0).stroke_width(3);
                body.draw(&PathElement::new(ends, style)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Where the label of a line that ends at `end` begins, without crossing the goal's stroke.
    fn beside(&self, end: i32, label: &str, goal: Option<f64>) -> i32 {
        // The width is an estimate, as the font is unknown.
        let width = 8 * label.chars().count() as i32;
        match goal.map(|goal| self.place(goal)) {
            Some(goal) if (end..end + width).contains(&goal) => goal + 7,
            _ => end + 7,
        }
    }

    /// Draws a mark. Returns its end.
    fn draw_mark(&self, area: &Area<'_>, mark: Mark, y: i32, colour: RGBColor) -> Result<i32> {
        match mark {
            Mark::Bar(bar) => {
                let corners =
                    [(LEFT, y - LINE / 2 + 2), (self.place(bar.median), y + LINE / 2 - 2)];
                area.draw(&Rectangle::new(corners, colour.filled())).map_err(failed)?;
                let whisker = vec![(self.place(bar.least), y), (self.place(bar.most), y)];
                area.draw(&PathElement::new(whisker, BLACK)).map_err(failed)?;
                Ok(self.place(bar.most.max(bar.median)))
            }
            Mark::Span(from, to) => {
                let (from, to) = (self.place(from), self.place(to));
                let style = colour.stroke_width(3);
                area.draw(&PathElement::new(vec![(from, y), (to, y)], style)).map_err(failed)?;
                area.draw(&Circle::new((from, y), 5, colour.filled())).map_err(failed)?;
                area.draw(&Circle::new((to, y), 5, WHITE.filled())).map_err(failed)?;
                area.draw(&Circle::new((to, y), 5, colour.stroke_width(2))).map_err(failed)?;
                Ok(to)
            }
        }
    }

    fn draw_axis(&self, area: &Area<'_>) -> Result<()> {
        let bottom = self.height();
        let light = RGBColor(225, 225, 225);
        for tick in self.ticks() {
            let x = self.place(tick);
            area.draw(&PathElement::new(vec![(x, 0), (x, bottom)], light)).map_err(failed)?;
            let style = text(13, GREY, HPos::Center);
            area.draw_text(&short(tick), &style, (x, bottom + 12)).map_err(failed)?;
        }
        let style = text(13, GREY, HPos::Center);
        let middle = i32::midpoint(LEFT, RIGHT);
        area.draw_text(&self.unit, &style, (middle, bottom + 34)).map_err(failed)
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear(most) => (0..=8).map(|i| f64::from(i) * most / 8.0).collect(),
            Scale::Decades(from, to) => (from..=to).map(|power| 10f64.powi(power)).collect(),
        }
    }

    /// The position of a figure; values outside of the scale are at the edge.
    fn place(&self, value: f64) -> i32 {
        let part = match self.scale {
            Scale::Linear(most) => value / most,
            Scale::Decades(from, to) => (value.log10() - f64::from(from)) / f64::from(to - from),
        };
        LEFT + (part.clamp(0.0, 1.0) * f64::from(RIGHT - LEFT)) as i32
    }
}

fn text(size: i32, colour: RGBColor, side: HPos) -> TextStyle<'static> {
    (FONT, size).into_font().color(&colour).pos(Pos::new(side, VPos::Center))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(name: &str, scale: Scale, mark: Mark) -> String {
        let line = |mark| Some(Line { mark, label: "a label".into() });
        let lines = Lines {
            title: "A title".into(),
            unit: "a unit".into(),
            scale,
            series: vec!["one".into(), "two".into()],
            groups: vec![
                Group { name: "first".into(), lines: vec![line(mark), None], goal: Some(0.5) },
                Group { name: "second".into(), lines: vec![line(mark), line(mark)], goal: None },
            ],
        };
        let file = format!("bench-lines-{}-{name}.svg", std::process::id());
        let file = std::env::temp_dir().join(file);
        lines.draw(&file).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        text
    }

    #[test]
    fn each_line_is_drawn_with_its_label_and_gaps_are_left_out() {
        let text = drawn("bars", Scale::Linear(2.0), Mark::Bar(Bar::of(&[1.0, 3.0])));
        for word in ["A title", "a unit", "one", "two", "first", "second"] {
            assert!(text.contains(word), "{word} is not in the plot");
        }
        assert_eq!(text.matches("a label").count(), 3);
        // Background, two of the legend, three bars.
        assert_eq!(text.matches("<rect").count(), 6, "{text}");
        let text = drawn("spans", Scale::Decades(0, 3), Mark::Span(1.0, 100.0));
        assert_eq!(text.matches("<circle").count(), 9, "{text}");
    }

    #[test]
    fn values_outside_are_drawn_at_the_edge() {
        let mut lines = Lines {
            title: String::new(),
            unit: String::new(),
            scale: Scale::Linear(2.0),
            series: Vec::new(),
            groups: Vec::new(),
        };
        assert_eq!([0.0, 1.0, 2.0, 9.0].map(|x| lines.place(x)), [225, 492, 760, 760]);
        lines.scale = Scale::Decades(0, 2);
        assert_eq!([0.0, 1.0, 10.0, 1e6].map(|x| lines.place(x)), [225, 225, 492, 760]);
    }
}
